"""What data-class libraries write: titles everywhere, ``$defs`` with capital names, ``anyOf`` with null, defaults."""

from __future__ import annotations

from structured.schema_sample.case import DRAFT_7, SchemaCase, case

_ADDRESS = {
    "properties": {
        "street": {"title": "Street", "type": "string"},
        "city": {"title": "City", "type": "string"},
        "zip_code": {"title": "Zip Code", "type": "string", "pattern": "^\\d{5}$"},
        "country": {"$ref": "#/$defs/Country"},
    },
    "required": ["street", "city", "zip_code", "country"],
    "title": "Address",
    "type": "object",
}
_COUNTRY = {"enum": ["DE", "FR", "PL", "US"], "title": "Country", "type": "string"}

PYDANTIC: tuple[SchemaCase, ...] = (
    case(
        "pydantic user",
        "pydantic realistic anyOf null",
        {
            "properties": {
                "id": {"title": "Id", "type": "integer"},
                "name": {"default": "Jane Doe", "title": "Name", "type": "string"},
                "signup_ts": {
                    "anyOf": [{"format": "date-time", "type": "string"}, {"type": "null"}],
                    "default": None,
                    "title": "Signup Ts",
                },
                "friends": {"default": [], "items": {"type": "integer"}, "title": "Friends", "type": "array"},
            },
            "required": ["id"],
            "title": "User",
            "type": "object",
        },
        [{"id": 1}, {"id": 1, "name": "J", "signup_ts": "2024-01-01T00:00:00Z", "friends": [2]}],
        [{"name": "J"}, {"id": "one"}, {"id": 1, "signup_ts": "now"}],
    ),
    case(
        "pydantic order",
        "pydantic realistic $ref nested",
        {
            "$defs": {
                "Address": _ADDRESS,
                "Country": _COUNTRY,
                "Line": {
                    "properties": {
                        "sku": {"maxLength": 12, "minLength": 3, "title": "Sku", "type": "string"},
                        "quantity": {"exclusiveMinimum": 0, "title": "Quantity", "type": "integer"},
                        "price": {"minimum": 0, "multipleOf": 0.01, "title": "Price", "type": "number"},
                    },
                    "required": ["sku", "quantity", "price"],
                    "title": "Line",
                    "type": "object",
                },
            },
            "properties": {
                "order_id": {"format": "uuid", "title": "Order Id", "type": "string"},
                "ship_to": {"$ref": "#/$defs/Address"},
                "bill_to": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}], "default": None},
                "lines": {"items": {"$ref": "#/$defs/Line"}, "minItems": 1, "title": "Lines", "type": "array"},
            },
            "required": ["order_id", "ship_to", "lines"],
            "title": "Order",
            "type": "object",
        },
        [
            {
                "order_id": "123e4567-e89b-12d3-a456-426614174000",
                "ship_to": {"street": "Main 1", "city": "Bonn", "zip_code": "53111", "country": "DE"},
                "bill_to": None,
                "lines": [{"sku": "ABC", "quantity": 2, "price": 9.99}],
            }
        ],
        [
            {"order_id": "x", "ship_to": {}, "lines": []},
            {
                "order_id": "123e4567-e89b-12d3-a456-426614174000",
                "ship_to": {"street": "Main 1", "city": "Bonn", "zip_code": "53111", "country": "DE"},
                "lines": [],
            },
        ],
    ),
    case(
        "pydantic forbids extras",
        "pydantic realistic additionalProperties-false",
        {
            "additionalProperties": False,
            "properties": {
                "host": {"format": "hostname", "title": "Host", "type": "string"},
                "port": {"default": 5432, "maximum": 65535, "minimum": 1, "title": "Port", "type": "integer"},
                "ssl": {"default": True, "title": "Ssl", "type": "boolean"},
            },
            "required": ["host"],
            "title": "Database",
            "type": "object",
        },
        [{"host": "db.example.org"}, {"host": "localhost", "port": 1, "ssl": False}],
        [{"host": "db", "user": "x"}, {"port": 1}, {"host": "db", "port": 0}],
    ),
    case(
        "pydantic tuple and set",
        "pydantic realistic prefixItems uniqueItems refused",
        {
            "properties": {
                "origin": {
                    "maxItems": 2,
                    "minItems": 2,
                    "prefixItems": [{"type": "number"}, {"type": "number"}],
                    "title": "Origin",
                    "type": "array",
                },
                "tags": {"items": {"type": "string"}, "title": "Tags", "type": "array", "uniqueItems": True},
            },
            "required": ["origin", "tags"],
            "title": "Pin",
            "type": "object",
        },
        [{"origin": [0, 1.5], "tags": ["a"]}],
        [{"origin": [0], "tags": []}],
    ),
    case(
        "pydantic tuple",
        "pydantic realistic prefixItems",
        {
            "properties": {
                "colour": {
                    "maxItems": 3,
                    "minItems": 3,
                    "prefixItems": [{"maximum": 255, "minimum": 0, "type": "integer"}] * 3,
                    "title": "Colour",
                    "type": "array",
                }
            },
            "required": ["colour"],
            "title": "Pixel",
            "type": "object",
        },
        [{"colour": [0, 128, 255]}],
        [{"colour": [0, 128]}, {"colour": [0, 128, 256]}],
    ),
    case(
        "pydantic literal union without discriminator",
        "pydantic realistic anyOf const",
        {
            "$defs": {
                "Cat": {
                    "properties": {
                        "pet": {"const": "cat", "title": "Pet", "type": "string"},
                        "lives": {"maximum": 9, "minimum": 0, "title": "Lives", "type": "integer"},
                    },
                    "required": ["pet", "lives"],
                    "title": "Cat",
                    "type": "object",
                },
                "Dog": {
                    "properties": {
                        "pet": {"const": "dog", "title": "Pet", "type": "string"},
                        "barks": {"title": "Barks", "type": "boolean"},
                    },
                    "required": ["pet", "barks"],
                    "title": "Dog",
                    "type": "object",
                },
            },
            "properties": {"animal": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "title": "Animal"}},
            "required": ["animal"],
            "title": "Owner",
            "type": "object",
        },
        [{"animal": {"pet": "cat", "lives": 7}}, {"animal": {"pet": "dog", "barks": True}}],
        [{"animal": {"pet": "dog", "lives": 7}}, {"animal": {"pet": "cow"}}],
    ),
    case(
        "pydantic discriminated union",
        "pydantic realistic oneOf discriminator",
        {
            "$defs": {
                "Card": {
                    "properties": {"method": {"const": "card", "type": "string"}, "number": {"type": "string"}},
                    "required": ["method", "number"],
                    "type": "object",
                },
                "Cash": {
                    "properties": {"method": {"const": "cash", "type": "string"}},
                    "required": ["method"],
                    "type": "object",
                },
            },
            "properties": {
                "payment": {
                    "discriminator": {
                        "mapping": {"card": "#/$defs/Card", "cash": "#/$defs/Cash"},
                        "propertyName": "method",
                    },
                    "oneOf": [{"$ref": "#/$defs/Card"}, {"$ref": "#/$defs/Cash"}],
                }
            },
            "required": ["payment"],
            "type": "object",
        },
        [{"payment": {"method": "cash"}}, {"payment": {"method": "card", "number": "4242"}}],
        [{"payment": {"method": "card"}}, {"payment": {"method": "cheque"}}],
    ),
    case(
        "pydantic decimal",
        "pydantic realistic anyOf pattern refused",
        {
            "properties": {
                "amount": {
                    "anyOf": [
                        {"minimum": 0, "type": "number"},
                        {"pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "type": "string"},
                    ],
                    "title": "Amount",
                }
            },
            "required": ["amount"],
            "title": "Payment",
            "type": "object",
        },
        [{"amount": 1.5}, {"amount": "1.5"}],
        [{"amount": -1}, {"amount": "+"}],
    ),
    case(
        "pydantic calendar event",
        "pydantic realistic $ref format",
        {
            "$defs": {
                "Participant": {
                    "properties": {
                        "email": {"format": "email", "title": "Email", "type": "string"},
                        "status": {"$ref": "#/$defs/Status", "default": "needs-action"},
                    },
                    "required": ["email"],
                    "title": "Participant",
                    "type": "object",
                },
                "Status": {
                    "enum": ["needs-action", "accepted", "declined", "tentative"],
                    "title": "Status",
                    "type": "string",
                },
            },
            "properties": {
                "name": {"title": "Name", "type": "string"},
                "starts_at": {"format": "date-time", "title": "Starts At", "type": "string"},
                "lasts": {"format": "duration", "title": "Lasts", "type": "string"},
                "participants": {
                    "items": {"$ref": "#/$defs/Participant"},
                    "title": "Participants",
                    "type": "array",
                },
            },
            "required": ["name", "starts_at", "lasts", "participants"],
            "title": "CalendarEvent",
            "type": "object",
        },
        [
            {
                "name": "Science fair",
                "starts_at": "2024-06-07T09:00:00+02:00",
                "lasts": "PT2H",
                "participants": [{"email": "alice@example.org"}, {"email": "bob@example.org", "status": "declined"}],
            }
        ],
        [
            {"name": "x", "starts_at": "Friday", "lasts": "PT2H", "participants": []},
            {"name": "x", "starts_at": "2024-06-07T09:00:00Z", "lasts": "PT2H", "participants": [{"email": "alice"}]},
        ],
    ),
    case(
        "pydantic map of models",
        "pydantic realistic additionalProperties-schema",
        {
            "$defs": {
                "Score": {
                    "properties": {"points": {"type": "integer"}, "rank": {"type": ["integer", "null"]}},
                    "required": ["points"],
                    "type": "object",
                }
            },
            "additionalProperties": {"$ref": "#/$defs/Score"},
            "title": "Scores",
            "type": "object",
        },
        [{}, {"ada": {"points": 3, "rank": None}, "bob": {"points": 1}}],
        [{"ada": 3}, {"ada": {"rank": 1}}],
    ),
    case(
        "pydantic recursive comment",
        "pydantic realistic recursion",
        {
            "$defs": {
                "Comment": {
                    "properties": {
                        "author": {"title": "Author", "type": "string"},
                        "text": {"maxLength": 280, "title": "Text", "type": "string"},
                        "replies": {"default": [], "items": {"$ref": "#/$defs/Comment"}, "type": "array"},
                    },
                    "required": ["author", "text"],
                    "title": "Comment",
                    "type": "object",
                }
            },
            "$ref": "#/$defs/Comment",
        },
        [{"author": "a", "text": "b", "replies": [{"author": "c", "text": "d"}]}],
        [{"author": "a"}, {"author": "a", "text": "b", "replies": [{}]}],
    ),
    case(
        "pydantic list root",
        "pydantic realistic array",
        {"items": {"format": "ipv4", "type": "string"}, "maxItems": 4, "title": "Hosts", "type": "array"},
        [[], ["127.0.0.1", "10.0.0.254"]],
        [["localhost"], "127.0.0.1"],
    ),
    case(
        "dataclass with a forward reference, draft 7",
        "realistic draft-7 definitions recursion",
        {
            "$schema": DRAFT_7,
            "$ref": "#/definitions/Department",
            "definitions": {
                "Department": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "head": {"anyOf": [{"$ref": "#/definitions/Person"}, {"type": "null"}]},
                        "parts": {"type": "array", "items": {"$ref": "#/definitions/Department"}},
                    },
                    "required": ["name", "head", "parts"],
                    "additionalProperties": False,
                },
                "Person": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "since": {"type": "integer", "minimum": 1900}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
        },
        [{"name": "IT", "head": {"name": "Ada", "since": 1999}, "parts": [{"name": "QA", "head": None, "parts": []}]}],
        [{"name": "IT", "head": None}, {"name": "IT", "head": {"name": "Ada", "since": 1815}, "parts": []}],
    ),
)

ZOD: tuple[SchemaCase, ...] = (
    case(
        "zod sign-up form",
        "zod realistic draft-7",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {
                "username": {"type": "string", "minLength": 3, "maxLength": 20},
                "email": {"type": "string", "format": "email"},
                "website": {"type": "string", "format": "uri"},
                "age": {"type": "integer", "exclusiveMinimum": 17},
                "terms": {"type": "boolean", "const": True},
            },
            "required": ["username", "email", "terms"],
            "additionalProperties": False,
        },
        [{"username": "ada", "email": "a@b.org", "age": 18, "terms": True}],
        [
            {"username": "ad", "email": "a@b.org", "terms": True},
            {"username": "ada", "email": "a@b.org", "terms": False},
        ],
    ),
    case(
        "zod nullable and default",
        "zod realistic draft-7",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {
                "title": {"type": ["string", "null"]},
                "level": {"type": "string", "enum": ["low", "mid", "high"], "default": "mid"},
                "ratio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            },
            "required": ["title", "ratio"],
            "additionalProperties": False,
        },
        [{"title": None, "ratio": 0.5}, {"title": "t", "level": "high", "ratio": 1}],
        [{"title": None, "ratio": 0}, {"title": None, "level": "top", "ratio": 1}],
    ),
    case(
        "zod discriminated union",
        "zod realistic anyOf draft-7",
        {
            "$schema": DRAFT_7,
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"status": {"type": "string", "const": "success"}, "data": {}},
                    "required": ["status"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "status": {"type": "string", "const": "failed"},
                        "error": {
                            "type": "object",
                            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
                            "required": ["code", "message"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["status", "error"],
                    "additionalProperties": False,
                },
            ],
        },
        [{"status": "success", "data": [1]}, {"status": "failed", "error": {"code": 5, "message": "no"}}],
        [{"status": "failed"}, {"status": "unknown", "data": 1}],
    ),
    case(
        "zod tuple with rest",
        "zod realistic prefixItems",
        {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "number"}],
            "items": {"type": "boolean"},
            "minItems": 2,
        },
        [["a", 1], ["a", 1.5, True, False]],
        [["a"], ["a", 1, 0]],
    ),
    case(
        "zod record",
        "zod realistic propertyNames",
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["en", "de"]},
            "additionalProperties": {"type": "string"},
        },
        [{"en": "yes", "de": "ja"}],
        [{"fr": "oui"}],
    ),
    case(
        "zod integer with safe bounds",
        "zod realistic integer large",
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        [0, 9007199254740991, -9007199254740991],
        [9007199254740992, 0.5],
    ),
    case(
        "zod intersection",
        "zod realistic allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
                {
                    "type": "object",
                    "properties": {"created": {"type": "string", "format": "date-time"}},
                    "required": ["created"],
                },
            ]
        },
        [{"id": "1", "created": "2024-12-31T23:59:59Z"}],
        [{"id": "1"}, {"id": "1", "created": "2024"}],
    ),
    case(
        "zod lazy category",
        "zod realistic recursion draft-7",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {"name": {"type": "string"}, "subcategories": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["name", "subcategories"],
            "additionalProperties": False,
        },
        [{"name": "People", "subcategories": [{"name": "Politicians", "subcategories": []}]}],
        [{"name": "People"}, {"name": "People", "subcategories": [{"name": 1, "subcategories": []}]}],
    ),
)

CASES = PYDANTIC + ZOD
