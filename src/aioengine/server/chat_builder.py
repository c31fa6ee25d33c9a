"""A chat for the model's template, from APIs that send it in pieces."""

from __future__ import annotations

from typing import Any


class ChatBuilder:
    """Puts messages together: one for consecutive pieces of the assistant, and one of the system, as templates need it.

    Attributes:
        messages: so far, as the engine takes them.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, text: str) -> None:
        """Add a message of another than the assistant; one of the system goes on with the one before."""
        if role == "system" and self._last_role == role:
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def add_answer(self, text: str) -> None:
        """Add a text of the assistant."""
        self._assistant_before("content", "tool_calls")["content"] = text

    def add_reasoning(self, text: str) -> None:
        """Add reasoning of the assistant, which is before its text."""
        self._assistant_before("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call that the assistant asks for; ``arguments`` is JSON."""
        function = {"name": name, "arguments": arguments}
        calls = self._assistant_before().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def _last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _assistant_before(self, *names: str) -> dict[str, Any]:
        """The assistant's message that is open, if it has none of these yet; else a new one."""
        if self._last_role != "assistant" or any(self.messages[-1].get(name) for name in names):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]
