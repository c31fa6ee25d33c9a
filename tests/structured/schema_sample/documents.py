"""Records of many trades, and files of configuration."""

from __future__ import annotations

from structured.schema_sample.case import DRAFT_7, SchemaCase, case

_POSITION = {
    "type": "array",
    "prefixItems": [
        {"type": "number", "minimum": -180, "maximum": 180},
        {"type": "number", "minimum": -90, "maximum": 90},
    ],
    "items": False,
    "minItems": 2,
}

RECORDS: tuple[SchemaCase, ...] = (
    case(
        "GitHub issue",
        "realistic nested open",
        {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "minimum": 1},
                "title": {"type": "string", "maxLength": 256},
                "state": {"enum": ["open", "closed"]},
                "labels": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "color": {"type": "string", "pattern": "^[0-9a-f]{6}$"},
                        },
                        "required": ["name", "color"],
                    },
                },
                "assignee": {
                    "anyOf": [
                        {"type": "null"},
                        {"type": "object", "properties": {"login": {"type": "string"}}, "required": ["login"]},
                    ]
                },
                "created_at": {"type": "string", "format": "date-time"},
            },
            "required": ["number", "title", "state", "labels", "assignee"],
        },
        [
            {
                "number": 7,
                "title": "It breaks",
                "state": "open",
                "labels": [{"name": "bug", "color": "d73a4a"}],
                "assignee": {"login": "ada"},
                "created_at": "2024-02-29T10:00:00Z",
            },
            {"number": 8, "title": "", "state": "closed", "labels": [], "assignee": None},
        ],
        [
            {"number": 0, "title": "", "state": "open", "labels": [], "assignee": None},
            {"number": 1, "title": "", "state": "open", "labels": [{"name": "x", "color": "red"}], "assignee": None},
        ],
    ),
    case(
        "invoice",
        "realistic nested multipleOf",
        {
            "type": "object",
            "properties": {
                "number": {"type": "string", "pattern": "^INV-[0-9]{4}-[0-9]{3,6}$"},
                "issued": {"type": "string", "format": "date"},
                "currency": {"type": "string", "enum": ["EUR", "USD", "GBP", "JPY", "CHF"]},
                "items": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "text": {"type": "string"},
                            "quantity": {"type": "number", "exclusiveMinimum": 0},
                            "unit_price": {"type": "number", "multipleOf": 0.01},
                            "vat": {"enum": [0, 0.07, 0.19]},
                        },
                        "required": ["text", "quantity", "unit_price", "vat"],
                        "additionalProperties": False,
                    },
                },
                "paid": {"type": "boolean"},
            },
            "required": ["number", "issued", "currency", "items"],
            "additionalProperties": False,
        },
        [
            {
                "number": "INV-2024-001",
                "issued": "2024-03-31",
                "currency": "EUR",
                "items": [{"text": "Work", "quantity": 1.5, "unit_price": 80.25, "vat": 0.19}],
                "paid": False,
            }
        ],
        [
            {"number": "INV-24-1", "issued": "2024-03-31", "currency": "EUR", "items": []},
            {
                "number": "INV-2024-001",
                "issued": "2024-04-31",
                "currency": "EUR",
                "items": [{"text": "Work", "quantity": 1, "unit_price": 1, "vat": 0}],
            },
        ],
    ),
    case(
        "patient record",
        "realistic nested format",
        {
            "type": "object",
            "properties": {
                "mrn": {"type": "string", "pattern": "^[0-9]{8}$"},
                "birth_date": {"type": "string", "format": "date"},
                "sex": {"enum": ["female", "male", "other", "unknown"]},
                "allergies": {"type": "array", "items": {"type": "string", "minLength": 2}},
                "vitals": {
                    "type": "object",
                    "properties": {
                        "pulse": {"type": "integer", "minimum": 20, "maximum": 300},
                        "temperature": {"type": "number", "minimum": 30, "maximum": 45},
                        "pressure": {
                            "type": "array",
                            "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                            "items": False,
                            "minItems": 2,
                        },
                    },
                    "required": ["pulse"],
                    "additionalProperties": False,
                },
                "medication": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "dose": {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)? (mg|ml|g)$"},
                            "times": {"type": "array", "items": {"enum": ["morning", "noon", "night"]}, "maxItems": 3},
                        },
                        "required": ["name", "dose"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["mrn", "birth_date", "sex", "vitals"],
            "additionalProperties": False,
        },
        [
            {
                "mrn": "00012345",
                "birth_date": "1980-02-29",
                "sex": "female",
                "allergies": ["nuts"],
                "vitals": {"pulse": 72, "temperature": 36.6, "pressure": [120, 80]},
                "medication": [{"name": "Ibuprofen", "dose": "400 mg", "times": ["night"]}],
            }
        ],
        [
            {"mrn": "1", "birth_date": "1980-02-29", "sex": "female", "vitals": {"pulse": 72}},
            {"mrn": "00012345", "birth_date": "1980-02-29", "sex": "female", "vitals": {"pulse": 10}},
        ],
    ),
    case(
        "laboratory result",
        "realistic union",
        {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[0-9]{1,5}-[0-9]$"},
                "value": {"anyOf": [{"type": "number"}, {"enum": ["positive", "negative"]}, {"type": "null"}]},
                "unit": {"type": "string"},
                "flag": {"enum": ["H", "L", "N"]},
            },
            "required": ["code", "value"],
            "additionalProperties": False,
        },
        [{"code": "718-7", "value": 13.5, "unit": "g/dL", "flag": "N"}, {"code": "1-0", "value": None}],
        [{"code": "718", "value": 1}, {"code": "718-7", "value": "maybe"}],
    ),
    case(
        "GeoJSON geometry",
        "realistic geo anyOf $ref",
        {
            "$defs": {"position": _POSITION},
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/position"}},
                    "required": ["type", "coordinates"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "LineString"},
                        "coordinates": {"type": "array", "items": {"$ref": "#/$defs/position"}, "minItems": 2},
                    },
                    "required": ["type", "coordinates"],
                    "additionalProperties": False,
                },
            ],
        },
        [
            {"type": "Point", "coordinates": [13.4, 52.5]},
            {"type": "LineString", "coordinates": [[0, 0], [180, -90]]},
        ],
        [{"type": "Point", "coordinates": [181, 0]}, {"type": "LineString", "coordinates": [[0, 0]]}],
    ),
    case(
        "GeoJSON feature",
        "realistic geo nested open",
        {
            "type": "object",
            "properties": {
                "type": {"const": "Feature"},
                "geometry": {
                    "anyOf": [
                        {"type": "null"},
                        {
                            "type": "object",
                            "properties": {"type": {"const": "Point"}, "coordinates": _POSITION},
                            "required": ["type", "coordinates"],
                        },
                    ]
                },
                "properties": {"type": ["object", "null"]},
            },
            "required": ["type", "geometry", "properties"],
        },
        [
            {"type": "Feature", "geometry": None, "properties": None},
            {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": {"name": "x"}},
        ],
        [{"type": "Feature", "geometry": None}, {"type": "Point", "geometry": None, "properties": {}}],
    ),
    case(
        "bounding box",
        "realistic geo array",
        {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4},
        [[-10, 40.5, 5, 50]],
        [[1, 2, 3], [1, 2, 3, "4"]],
    ),
    case(
        "recipe",
        "realistic nested duration",
        {
            "type": "object",
            "properties": {
                "title": {"type": "string", "minLength": 1},
                "serves": {"type": "integer", "minimum": 1, "maximum": 20},
                "time": {"type": "string", "format": "duration"},
                "ingredients": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "amount": {"type": ["number", "null"], "exclusiveMinimum": 0},
                            "unit": {"enum": ["g", "ml", "piece", "pinch", None]},
                        },
                        "required": ["name", "amount", "unit"],
                        "additionalProperties": False,
                    },
                },
                "steps": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 30},
            },
            "required": ["title", "serves", "ingredients", "steps"],
            "additionalProperties": False,
        },
        [
            {
                "title": "Toast",
                "serves": 1,
                "time": "PT5M",
                "ingredients": [{"name": "bread", "amount": 1, "unit": "piece"}],
                "steps": ["Toast it."],
            }
        ],
        [{"title": "Toast", "serves": 1, "ingredients": [], "steps": ["x"]}],
    ),
    case(
        "résumé",
        "realistic nested null",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "contact": {
                    "type": "object",
                    "properties": {
                        "email": {"type": ["string", "null"], "format": "email"},
                        "url": {"type": "string", "format": "uri"},
                    },
                    "additionalProperties": False,
                },
                "jobs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "employer": {"type": "string"},
                            "from": {"type": "string", "pattern": "^[12][0-9]{3}-(0[1-9]|1[0-2])$"},
                            "to": {
                                "anyOf": [
                                    {"type": "string", "pattern": "^[12][0-9]{3}-(0[1-9]|1[0-2])$"},
                                    {"const": "now"},
                                ]
                            },
                        },
                        "required": ["employer", "from", "to"],
                        "additionalProperties": False,
                    },
                },
                "skills": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 5}},
            },
            "required": ["name", "jobs"],
            "additionalProperties": False,
        },
        [
            {
                "name": "Ada",
                "contact": {"email": None, "url": "https://example.org"},
                "jobs": [{"employer": "B", "from": "1999-12", "to": "now"}],
                "skills": {"maths": 5},
            }
        ],
        [
            {"name": "Ada", "jobs": [{"employer": "B", "from": "1999-13", "to": "now"}]},
            {"name": "Ada", "jobs": [], "skills": {"x": 6}},
        ],
    ),
    case(
        "bank statement",
        "realistic array enum",
        {
            "type": "object",
            "properties": {
                "iban": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$"},
                "entries": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "on": {"type": "string", "format": "date"},
                            "cents": {"type": "integer", "minimum": -100000000, "maximum": 100000000},
                            "text": {"type": "string", "maxLength": 140},
                        },
                        "required": ["on", "cents"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["iban", "entries"],
            "additionalProperties": False,
        },
        [{"iban": "DE89370400440532013000", "entries": [{"on": "2024-01-31", "cents": -1999}]}],
        [
            {"iban": "DE8", "entries": []},
            {"iban": "DE89370400440532013000", "entries": [{"on": "2024-01-31", "cents": 0.5}]},
        ],
    ),
    case(
        "sensor reading",
        "realistic format range",
        {
            "type": "object",
            "properties": {
                "device": {"type": "string", "format": "uuid"},
                "at": {"type": "string", "format": "date-time"},
                "address": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
                "values": {"type": "array", "items": {"type": "number", "minimum": -40, "maximum": 125}, "minItems": 1},
                "battery": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
            },
            "required": ["device", "at", "values", "battery"],
            "additionalProperties": False,
        },
        [
            {
                "device": "123e4567-e89b-12d3-a456-426614174000",
                "at": "2024-12-31T23:59:59.999Z",
                "address": "::1",
                "values": [-40, 21.75],
                "battery": 95,
            }
        ],
        [
            {
                "device": "123e4567-e89b-12d3-a456-426614174000",
                "at": "2024-12-31T23:59:59Z",
                "values": [],
                "battery": 95,
            },
            {
                "device": "123e4567-e89b-12d3-a456-426614174000",
                "at": "2024-12-31T23:59:59Z",
                "values": [1],
                "battery": 97,
            },
        ],
    ),
    case(
        "chess game",
        "realistic pattern array",
        {
            "type": "object",
            "properties": {
                "result": {"enum": ["1-0", "0-1", "1/2-1/2", "*"]},
                "moves": {
                    "type": "array",
                    "items": {
                        "type": "string",
                        "pattern": "^([KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](=[QRBN])?|O-O(-O)?)[+#]?$",
                    },
                },
            },
            "required": ["result", "moves"],
            "additionalProperties": False,
        },
        [{"result": "1-0", "moves": ["e4", "e5", "Nf3", "O-O", "exd8=Q#"]}],
        [{"result": "draw", "moves": []}, {"result": "*", "moves": ["e9"]}],
    ),
    case(
        "translation table",
        "realistic map pattern",
        {
            "type": "object",
            "patternProperties": {
                "^[a-z]{2}(-[A-Z]{2})?$": {"type": "object", "additionalProperties": {"type": "string"}}
            },
            "additionalProperties": False,
        },
        [{}, {"en": {"yes": "yes"}, "pt-BR": {"yes": "sim"}}],
        [{"english": {}}, {"en": {"yes": 1}}],
    ),
    case(
        "a playlist",
        "realistic array maxItems",
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "seconds": {"type": "integer", "minimum": 1, "maximum": 36000},
                },
                "required": ["title", "seconds"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 8,
        },
        [[{"title": "One", "seconds": 215}]],
        [[], [{"title": "One", "seconds": 0}]],
    ),
    case(
        "exam of questions",
        "realistic anyOf tagged",
        {
            "type": "object",
            "properties": {
                "questions": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "anyOf": [
                            {
                                "type": "object",
                                "properties": {
                                    "kind": {"const": "choice"},
                                    "text": {"type": "string"},
                                    "options": {
                                        "type": "array",
                                        "items": {"type": "string"},
                                        "minItems": 2,
                                        "maxItems": 4,
                                    },
                                    "answer": {"type": "integer", "minimum": 0, "maximum": 3},
                                },
                                "required": ["kind", "text", "options", "answer"],
                                "additionalProperties": False,
                            },
                            {
                                "type": "object",
                                "properties": {
                                    "kind": {"const": "open"},
                                    "text": {"type": "string"},
                                    "keywords": {"type": "array", "items": {"type": "string"}},
                                },
                                "required": ["kind", "text"],
                                "additionalProperties": False,
                            },
                        ]
                    },
                }
            },
            "required": ["questions"],
            "additionalProperties": False,
        },
        [
            {
                "questions": [
                    {"kind": "choice", "text": "?", "options": ["a", "b"], "answer": 1},
                    {"kind": "open", "text": ""},
                ]
            }
        ],
        [{"questions": []}, {"questions": [{"kind": "open", "text": "", "answer": 1}]}],
    ),
)

CONFIGURATION: tuple[SchemaCase, ...] = (
    case(
        "package manifest",
        "realistic configuration draft-7",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^(@[a-z0-9-]+/)?[a-z0-9-]+$", "maxLength": 214},
                "version": {"type": "string", "pattern": "^[0-9]+\\.[0-9]+\\.[0-9]+$"},
                "private": {"type": "boolean"},
                "scripts": {"type": "object", "additionalProperties": {"type": "string"}},
                "dependencies": {"$ref": "#/definitions/ranges"},
                "devDependencies": {"$ref": "#/definitions/ranges"},
                "bin": {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]},
            },
            "required": ["name", "version"],
            "definitions": {"ranges": {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}},
        },
        [
            {
                "name": "@a/b",
                "version": "1.0.0",
                "scripts": {"test": "x"},
                "dependencies": {"left": "^1"},
                "bin": "cli.js",
            }
        ],
        [{"name": "A B", "version": "1.0.0"}, {"name": "a", "version": "1.0.0", "dependencies": {"b": ""}}],
    ),
    case(
        "compose file",
        "realistic configuration patternProperties union",
        {
            "type": "object",
            "properties": {
                "services": {
                    "type": "object",
                    "patternProperties": {
                        "^[a-z0-9_-]+$": {
                            "type": "object",
                            "properties": {
                                "image": {"type": "string"},
                                "command": {
                                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
                                },
                                "ports": {
                                    "type": "array",
                                    "items": {"type": "string", "pattern": "^[0-9]{2,5}:[0-9]{2,5}$"},
                                },
                                "restart": {"enum": ["no", "always", "on-failure"]},
                            },
                            "required": ["image"],
                            "additionalProperties": False,
                        }
                    },
                    "additionalProperties": False,
                }
            },
            "required": ["services"],
            "additionalProperties": False,
        },
        [{"services": {"web": {"image": "nginx", "command": ["a"], "ports": ["8080:80"], "restart": "always"}}}],
        [{"services": {"Web": {"image": "nginx"}}}, {"services": {"web": {}}}],
    ),
    case(
        "deployment",
        "realistic configuration nested",
        {
            "type": "object",
            "properties": {
                "apiVersion": {"const": "apps/v1"},
                "kind": {"const": "Deployment"},
                "metadata": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
                        "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
                    },
                    "required": ["name"],
                },
                "spec": {
                    "type": "object",
                    "properties": {
                        "replicas": {"type": "integer", "minimum": 0},
                        "containers": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "properties": {
                                    "name": {"type": "string"},
                                    "image": {"type": "string"},
                                    "resources": {
                                        "type": "object",
                                        "properties": {
                                            "cpu": {
                                                "anyOf": [
                                                    {"type": "number"},
                                                    {"type": "string", "pattern": "^[0-9]+m$"},
                                                ]
                                            },
                                            "memory": {"type": "string", "pattern": "^[0-9]+(Ki|Mi|Gi)$"},
                                        },
                                        "additionalProperties": False,
                                    },
                                },
                                "required": ["name", "image"],
                                "additionalProperties": False,
                            },
                        },
                    },
                    "required": ["replicas", "containers"],
                },
            },
            "required": ["apiVersion", "kind", "metadata", "spec"],
        },
        [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "web", "labels": {"app": "web"}},
                "spec": {
                    "replicas": 2,
                    "containers": [{"name": "w", "image": "i", "resources": {"cpu": "250m", "memory": "64Mi"}}],
                },
            }
        ],
        [
            {"apiVersion": "v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {}},
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "Web"},
                "spec": {"replicas": 2, "containers": [{"name": "w", "image": "i"}]},
            },
        ],
    ),
    case(
        "workflow",
        "realistic configuration map",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "on": {"type": "array", "items": {"enum": ["push", "pull_request", "schedule"]}, "minItems": 1},
                "jobs": {
                    "type": "object",
                    "minProperties": 1,
                    "additionalProperties": {
                        "type": "object",
                        "properties": {
                            "runs-on": {"type": "string"},
                            "needs": {"type": "array", "items": {"type": "string"}},
                            "steps": {
                                "type": "array",
                                "items": {
                                    "anyOf": [
                                        {
                                            "type": "object",
                                            "properties": {"run": {"type": "string"}},
                                            "required": ["run"],
                                            "additionalProperties": False,
                                        },
                                        {
                                            "type": "object",
                                            "properties": {"uses": {"type": "string"}, "with": {"type": "object"}},
                                            "required": ["uses"],
                                            "additionalProperties": False,
                                        },
                                    ]
                                },
                            },
                        },
                        "required": ["runs-on", "steps"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["on", "jobs"],
        },
        [
            {
                "on": ["push"],
                "jobs": {"test": {"runs-on": "linux", "steps": [{"run": "make"}, {"uses": "a@v1", "with": {}}]}},
            }
        ],
        [{"on": [], "jobs": {}}, {"on": ["push"], "jobs": {}}],
    ),
    case(
        "logging",
        "realistic configuration enum",
        {
            "type": "object",
            "properties": {
                "version": {"const": 1},
                "level": {"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]},
                "handlers": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "properties": {"class": {"type": "string"}, "path": {"type": ["string", "null"]}},
                        "required": ["class"],
                    },
                },
            },
            "required": ["version"],
            "additionalProperties": False,
        },
        [{"version": 1}, {"version": 1, "level": "INFO", "handlers": {"file": {"class": "F", "path": "/x"}}}],
        [{"version": 2}, {"version": 1, "level": "info"}],
    ),
    case(
        "feature flags",
        "realistic configuration map union",
        {
            "type": "object",
            "additionalProperties": {
                "anyOf": [
                    {"type": "boolean"},
                    {"type": "integer", "minimum": 0, "maximum": 100},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                ]
            },
        },
        [{}, {"dark": True, "beta": 25, "for": ["ada"]}],
        [{"beta": 101}, {"for": []}, {"dark": None}],
    ),
    case(
        "keyboard shortcuts",
        "realistic configuration pattern",
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "keys": {
                        "type": "string",
                        "pattern": "^((ctrl|alt|shift|cmd)\\+)*([a-z0-9]|f[1-9]|f1[0-2]|enter)$",
                    },
                    "command": {"type": "string", "pattern": "^[a-z]+(\\.[a-zA-Z]+)+$"},
                    "when": {"type": "string"},
                },
                "required": ["keys", "command"],
                "additionalProperties": False,
            },
        },
        [[], [{"keys": "ctrl+shift+f12", "command": "editor.action.format"}]],
        [[{"keys": "ctrl+", "command": "a.b"}], [{"keys": "f5", "command": "run"}]],
    ),
    case(
        "linter rules",
        "realistic configuration tuple",
        {
            "type": "object",
            "properties": {
                "rules": {
                    "type": "object",
                    "additionalProperties": {
                        "anyOf": [
                            {"enum": ["off", "warn", "error", 0, 1, 2]},
                            {
                                "type": "array",
                                "prefixItems": [{"enum": ["off", "warn", "error"]}, {"type": "object"}],
                                "items": False,
                                "minItems": 1,
                            },
                        ]
                    },
                }
            },
            "required": ["rules"],
            "additionalProperties": False,
        },
        [{"rules": {"semi": 2, "quotes": ["error", {"avoid": True}]}}],
        [{"rules": {"semi": 3}}, {"rules": {"quotes": []}}],
    ),
)

CASES = RECORDS + CONFIGURATION
