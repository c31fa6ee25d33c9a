"""JSON schemas: references inside of them, those of Python types, and structs that other libraries can take."""
