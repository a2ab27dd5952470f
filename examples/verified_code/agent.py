"""An agent whose work is judged in the gateway's sandbox: it asks, finishes with tests, and reads the verdict.

    python examples/verified_code/agent.py [BASE_URL]

An emulated model answers nonsense, so this agent leaves a program text of its own behind, as one that edits files does.
"""

import sys
import time

import openai

import loadwise

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = openai.OpenAI(base_url=base_url, api_key="unused")

with loadwise.program(client, task_type="function") as p:
    p.client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Write add(a, b)."}])
    p.artefacts["code"] = "def add(a, b):\n    return a + b\n"
    p.references["tests"] = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"

while (shown := client.get(f"/programs/{p.id}", cast_to=dict))["verdict"] is None:
    time.sleep(0.2)
print(p.id, shown["verdict"]["verdict"], shown["verdict"]["explanation"], "credited:", shown["is_credited"])
