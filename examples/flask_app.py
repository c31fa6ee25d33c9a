"""A Flask app: each request calls the engine from a thread of the server's, and they share its steps.

    python examples/flask_app.py          # or, each worker with an engine: gunicorn --threads 8 examples.flask_app:app

    curl localhost:8000/ask -H 'Content-Type: application/json' -d '{"question": "What is 8 + 7?"}'

A process that forks must make its engine afterwards: leave out gunicorn's `--preload`, and Flask's reloader.
"""

from __future__ import annotations

import os

from flask import Flask, request

from aioengine import LLM, InvalidRequest

llm = LLM(os.environ.get("MODEL"))  # without MODEL the bundled one; threads beyond what it takes at once wait
app = Flask(__name__)


@app.post("/ask")
def ask() -> dict[str, str]:
    question = {"role": "user", "content": request.get_json()["question"]}
    [output] = llm.chat([question], max_tokens=400)
    return {"answer": output.text}


@app.errorhandler(InvalidRequest)
def bad_request(error: InvalidRequest) -> tuple[dict[str, str], int]:
    return {"error": str(error)}, 400


if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "8000")))
