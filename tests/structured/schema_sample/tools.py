"""Parameters of tools and functions, and shapes of answers, as programs send them with a chat."""

from __future__ import annotations

from structured.schema_sample.case import DRAFT_7, SchemaCase, case

_STRICT = {"additionalProperties": False}

CASES: tuple[SchemaCase, ...] = (
    case(
        "weather tool",
        "tool realistic enum",
        {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City and country, e.g. Paris, France"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
        [{"location": "Paris, France"}, {"location": "Oslo", "unit": "celsius"}],
        [{"unit": "celsius"}, {"location": "Oslo", "unit": "kelvin"}],
    ),
    case(
        "weather tool, strict",
        "tool strict realistic",
        {
            "type": "object",
            "properties": {
                "location": {"type": "string"},
                "unit": {"type": ["string", "null"], "enum": ["celsius", "fahrenheit", None]},
            },
            "required": ["location", "unit"],
            **_STRICT,
        },
        [{"location": "Oslo", "unit": None}, {"location": "Oslo", "unit": "celsius"}],
        [{"location": "Oslo"}, {"location": "Oslo", "unit": "kelvin"}],
    ),
    case(
        "tool without parameters",
        "tool strict realistic",
        {"type": "object", "properties": {}, "required": [], **_STRICT},
        [{}],
        [{"a": 1}, []],
    ),
    case("tool without a word", "tool realistic", {"type": "object", "properties": {}}, [{}, {"a": 1}], [None, []]),
    case(
        "send mail, strict",
        "tool strict realistic array",
        {
            "type": "object",
            "properties": {
                "to": {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1},
                "subject": {"type": "string", "maxLength": 78},
                "body": {"type": "string"},
                "send_at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
            },
            "required": ["to", "subject", "body", "send_at"],
            **_STRICT,
        },
        [{"to": ["a@b.org"], "subject": "Hi", "body": "Line\nline", "send_at": None}],
        [
            {"to": [], "subject": "Hi", "body": "", "send_at": None},
            {"to": ["a@b.org"], "subject": "Hi", "body": "", "send_at": "tomorrow"},
        ],
    ),
    case(
        "reasoning in steps, strict",
        "answer strict realistic $ref",
        {
            "$defs": {
                "Step": {
                    "type": "object",
                    "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                    "required": ["explanation", "output"],
                    **_STRICT,
                }
            },
            "type": "object",
            "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}}, "final": {"type": "string"}},
            "required": ["steps", "final"],
            **_STRICT,
        },
        [{"steps": [{"explanation": "8x = 8", "output": "x = 1"}], "final": "1"}],
        [{"steps": ["8x"], "final": "1"}, {"steps": []}],
    ),
    case(
        "moderation, strict",
        "answer strict realistic null",
        {
            "type": "object",
            "properties": {
                "is_violating": {"type": "boolean"},
                "category": {
                    "anyOf": [{"type": "string", "enum": ["violence", "spam", "self_harm"]}, {"type": "null"}]
                },
                "explanation": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["is_violating", "category", "explanation"],
            **_STRICT,
        },
        [{"is_violating": False, "category": None, "explanation": None}],
        [{"is_violating": True, "category": "other", "explanation": ""}, {"is_violating": True}],
    ),
    case(
        "one of several function calls",
        "tool strict realistic anyOf",
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "search"},
                        "arguments": {
                            "type": "object",
                            "properties": {
                                "query": {"type": "string", "minLength": 1},
                                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                            },
                            "required": ["query"],
                            **_STRICT,
                        },
                    },
                    "required": ["name", "arguments"],
                    **_STRICT,
                },
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "search_images"},
                        "arguments": {
                            "type": "object",
                            "properties": {"query": {"type": "string"}, "safe": {"type": "boolean"}},
                            "required": ["query", "safe"],
                            **_STRICT,
                        },
                    },
                    "required": ["name", "arguments"],
                    **_STRICT,
                },
            ]
        },
        [
            {"name": "search", "arguments": {"query": "cats", "limit": 5}},
            {"name": "search_images", "arguments": {"query": "", "safe": True}},
        ],
        [{"name": "search", "arguments": {"query": "cats", "safe": True}}, {"name": "find", "arguments": {}}],
    ),
    case(
        "calls in parallel",
        "tool strict realistic array",
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "pattern": "^call_[a-z0-9]{4,8}$"},
                    "name": {"enum": ["read_file", "write_file"]},
                    "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
                },
                "required": ["id", "name", "arguments"],
                **_STRICT,
            },
        },
        [[{"id": "call_ab12", "name": "read_file", "arguments": {"path": "/etc/hosts"}}]],
        [[], [{"id": "ab12", "name": "read_file", "arguments": {}}]],
    ),
    case(
        "MCP file search",
        "mcp tool realistic draft-7",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "pattern": {"type": "string"},
                "excludePatterns": {"type": "array", "items": {"type": "string"}, "default": []},
            },
            "required": ["path", "pattern"],
            "additionalProperties": False,
        },
        [{"path": ".", "pattern": "*.py"}, {"path": ".", "pattern": "*", "excludePatterns": [".git"]}],
        [{"path": "."}, {"path": ".", "pattern": "*", "excludePatterns": "x"}],
    ),
    case(
        "MCP edits of a file",
        "mcp tool realistic draft-7",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "edits": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "oldText": {"type": "string", "description": "Text to search for - must match exactly"},
                            "newText": {"type": "string", "description": "Text to replace with"},
                        },
                        "required": ["oldText", "newText"],
                        "additionalProperties": False,
                    },
                },
                "dryRun": {"type": "boolean", "default": False},
            },
            "required": ["path", "edits"],
            "additionalProperties": False,
        },
        [{"path": "a", "edits": [{"oldText": "x", "newText": ""}], "dryRun": True}],
        [{"path": "a", "edits": [{"oldText": "x"}]}, {"edits": []}],
    ),
    case(
        "MCP knowledge graph",
        "mcp tool realistic nested",
        {
            "type": "object",
            "properties": {
                "entities": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "entityType": {"type": "string"},
                            "observations": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["name", "entityType", "observations"],
                    },
                }
            },
            "required": ["entities"],
        },
        [{"entities": [{"name": "Ada", "entityType": "person", "observations": ["born 1815"]}]}],
        [{"entities": [{"name": "Ada"}]}, {}],
    ),
    case(
        "MCP thought",
        "mcp tool realistic integer",
        {
            "type": "object",
            "properties": {
                "thought": {"type": "string"},
                "nextThoughtNeeded": {"type": "boolean"},
                "thoughtNumber": {"type": "integer", "minimum": 1},
                "totalThoughts": {"type": "integer", "minimum": 1},
                "branchId": {"type": "string"},
            },
            "required": ["thought", "nextThoughtNeeded", "thoughtNumber", "totalThoughts"],
        },
        [{"thought": "hm", "nextThoughtNeeded": True, "thoughtNumber": 1, "totalThoughts": 3}],
        [{"thought": "hm", "nextThoughtNeeded": True, "thoughtNumber": 0, "totalThoughts": 3}],
    ),
    case(
        "run a query",
        "tool strict realistic union",
        {
            "type": "object",
            "properties": {
                "sql": {"type": "string", "minLength": 6, "pattern": "^SELECT "},
                "parameters": {"type": "array", "items": {"type": ["string", "number", "boolean", "null"]}},
                "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 30},
            },
            "required": ["sql", "parameters", "timeout_s"],
            **_STRICT,
        },
        [{"sql": "SELECT 1", "parameters": ["a", 1.5, None], "timeout_s": 2.5}],
        [
            {"sql": "DROP TABLE t", "parameters": [], "timeout_s": 1},
            {"sql": "SELECT 1", "parameters": [[]], "timeout_s": 1},
        ],
    ),
    case(
        "book a flight",
        "tool strict realistic format",
        {
            "type": "object",
            "properties": {
                "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
                "to": {"type": "string", "pattern": "^[A-Z]{3}$"},
                "date": {"type": "string", "format": "date"},
                "passengers": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 3,
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "seat": {"type": ["string", "null"], "pattern": "^[0-9]{1,2}[A-F]$"},
                        },
                        "required": ["name", "seat"],
                        **_STRICT,
                    },
                },
            },
            "required": ["from", "to", "date", "passengers"],
            **_STRICT,
        },
        [{"from": "CDG", "to": "JFK", "date": "2028-02-29", "passengers": [{"name": "A", "seat": "12C"}]}],
        [
            {"from": "cdg", "to": "JFK", "date": "2028-02-29", "passengers": [{"name": "A", "seat": None}]},
            {"from": "CDG", "to": "JFK", "date": "2028-02-29", "passengers": [{"name": "A", "seat": "12G"}]},
        ],
    ),
    case(
        "move a robot",
        "tool realistic tuple",
        {
            "type": "object",
            "properties": {
                "waypoints": {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3},
                    "maxItems": 5,
                },
                "speed": {"enum": [0.25, 0.5, 1]},
                "gripper": {"enum": ["open", "closed"]},
            },
            "required": ["waypoints", "speed"],
            **_STRICT,
        },
        [{"waypoints": [[0, 0, 1.5]], "speed": 0.25, "gripper": "open"}],
        [{"waypoints": [[0, 0]], "speed": 1}, {"waypoints": [], "speed": 0.75}],
    ),
    case(
        "extraction of people",
        "answer strict realistic nested",
        {
            "type": "object",
            "properties": {
                "people": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "born": {"type": ["integer", "null"], "minimum": 0, "maximum": 2100},
                            "roles": {"type": "array", "items": {"enum": ["author", "editor", "translator"]}},
                        },
                        "required": ["name", "born", "roles"],
                        **_STRICT,
                    },
                }
            },
            "required": ["people"],
            **_STRICT,
        },
        [{"people": []}, {"people": [{"name": "Ada", "born": 1815, "roles": ["author"]}]}],
        [{"people": [{"name": "Ada", "born": 2101, "roles": []}]}, {"people": [{"name": "Ada"}]}],
    ),
    case(
        "sentiment",
        "answer strict realistic range",
        {
            "type": "object",
            "properties": {
                "label": {"type": "string", "enum": ["positive", "neutral", "negative"]},
                "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            },
            "required": ["label", "confidence"],
            **_STRICT,
        },
        [{"label": "neutral", "confidence": 0.5}, {"label": "positive", "confidence": 1}],
        [{"label": "good", "confidence": 0.5}, {"label": "neutral", "confidence": 1.01}],
    ),
    case(
        "browser action",
        "tool realistic anyOf $ref",
        {
            "$defs": {
                "Click": {
                    "type": "object",
                    "properties": {
                        "click": {
                            "type": "array",
                            "items": {"type": "integer", "minimum": 0},
                            "minItems": 2,
                            "maxItems": 2,
                        }
                    },
                    "required": ["click"],
                    **_STRICT,
                },
                "Type": {
                    "type": "object",
                    "properties": {"type": {"type": "string"}, "enter": {"type": "boolean", "default": False}},
                    "required": ["type"],
                    **_STRICT,
                },
                "Wait": {
                    "type": "object",
                    "properties": {"wait_ms": {"type": "integer", "minimum": 0, "maximum": 10000, "multipleOf": 100}},
                    "required": ["wait_ms"],
                    **_STRICT,
                },
            },
            "type": "object",
            "properties": {
                "thought": {"type": "string", "maxLength": 200},
                "action": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("Click", "Type", "Wait")]},
            },
            "required": ["thought", "action"],
            **_STRICT,
        },
        [{"thought": "", "action": {"click": [10, 20]}}, {"thought": "t", "action": {"wait_ms": 300}}],
        [{"thought": "", "action": {"click": [10]}}, {"thought": "", "action": {"wait_ms": 350}}],
    ),
    case(
        "shell command",
        "tool realistic optional",
        {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "cwd": {"type": "string", "pattern": "^/"},
                "env": {"type": "object", "patternProperties": {"^[A-Z_]+$": {"type": "string"}}, **_STRICT},
                "timeout": {"type": "integer", "minimum": 1},
            },
            "required": ["command"],
            **_STRICT,
        },
        [{"command": ["ls", "-l"]}, {"command": ["env"], "cwd": "/", "env": {"PATH": "/bin"}, "timeout": 5}],
        [{"command": []}, {"command": ["ls"], "cwd": "tmp"}, {"command": ["ls"], "env": {"path": "x"}}],
    ),
)
