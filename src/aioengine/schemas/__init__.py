"""`json_pointer`: references inside JSON documents, followed.

`type_schema`: the JSON schema of a type, and what reads its values: by pydantic or by msgspec, whichever knows all of
it. `plain_struct`: what answers are made of, for web frameworks.
"""
