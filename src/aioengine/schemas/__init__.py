"""JSON documents and schemas.

- `type_schema`: the schema of a type, and what reads its values. `json_pointer`: references inside a document.
- `plain_struct`: structs that web frameworks can return.
"""
