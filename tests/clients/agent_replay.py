"""Replays conversations of coding agents, shaped as those agents shape them: agent_replay.py http://HOST:PORT

Each has a long system prompt, several tools, and many rounds of calls and results. The same history goes through each face; all must make a
prompt of the same length, and the answer to the last turn must come through streamed and whole.
"""

import json
import sys
import urllib.request

BASE = sys.argv[1]
ROUNDS = 12


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def post(path, body):
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        text = reply.read().decode()
    return text if body.get("stream") else json.loads(text)


def schema(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)[:1], "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}


TEXT = {"type": "string", "description": "Text, taken as it is"}
TOOLS = [
    ("Bash", "Runs a command", schema(command=TEXT, timeout={"type": "number"}, run_in_background={"type": "boolean"})),
    ("Edit", "Replaces text in a file", schema(file_path=TEXT, old_string=TEXT, new_string=TEXT, replace_all={"type": "boolean", "default": False})),
    ("TodoWrite", "Keeps a list", schema(todos={"type": "array", "items": {"type": "object", "properties": {"content": TEXT, "status": {"enum": ["pending", "done"]}}}})),
    ("get_weather", "For the last turn", schema(city=TEXT, days={"type": "integer"})),
    ("now", "Tells the time", schema()),
]
SYSTEM = "You are an agent.\n" + "- A rule of the house, with <tags> & \"quotes\".\n" * 40


def arguments(i):
    return [
        ("Bash", {"command": f"grep -rn 'x < {i}' src/ && echo \"done\"\n", "timeout": 1000}),
        ("Edit", {"file_path": f"/src/{i}.py", "old_string": "a\n\tb", "new_string": "</arg> 🙂", "replace_all": i % 2 == 0}),
        ("TodoWrite", {"todos": [{"content": f"step {i}", "status": "done"}]}),
    ]


chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Fix the bug."}]
claude = [{"role": "user", "content": [{"type": "text", "text": "Fix the bug.", "cache_control": {"type": "ephemeral"}}]}]
codex = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]}]
for i in range(ROUNDS):
    calls = arguments(i)[: 1 + i % 3]
    ids = [f"call_{i}_{k}" for k in range(len(calls))]
    thought, said = f"Round {i}: look, then edit.", "On it." if i % 2 else ""
    chat.append({"role": "assistant", "content": said or None, "reasoning_content": thought,
                 "tool_calls": [{"id": id, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for id, (n, a) in zip(ids, calls)]})
    chat += [{"role": "tool", "tool_call_id": id, "content": f"result of {id}\n"} for id in ids]
    claude.append({"role": "assistant", "content": [{"type": "thinking", "thinking": thought, "signature": "x"}] + ([{"type": "text", "text": said}] if said else [])
                   + [{"type": "tool_use", "id": id, "name": n, "input": a} for id, (n, a) in zip(ids, calls)]})
    claude.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": f"result of {id}\n"}], "is_error": False} for id in ids]})
    codex.append({"type": "reasoning", "id": f"rs_{i}", "summary": [], "content": [{"type": "reasoning_text", "text": thought}], "encrypted_content": None})
    codex += [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}] if said else []
    codex += [{"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": n, "arguments": json.dumps(a)} for id, (n, a) in zip(ids, calls)]
    codex += [{"type": "function_call_output", "call_id": id, "output": f"result of {id}\n"} for id in ids]
chat.append({"role": "user", "content": "What is the weather?"})
claude.append({"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]})
codex.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]})

faces = {
    "chat": ("/v1/chat/completions", {"model": "demo", "messages": chat, "max_completion_tokens": 500, "parallel_tool_calls": True, "store": False,
             "tools": [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS]}),
    "messages": ("/v1/messages", {"model": "demo", "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}], "messages": claude,
                 "max_tokens": 500, "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 10000}, "temperature": 1,
                 "tools": [{"name": n, "description": d, "input_schema": p} for n, d, p in TOOLS]}),
    "responses": ("/v1/responses", {"model": "demo", "instructions": SYSTEM, "input": codex, "max_output_tokens": 500, "store": False, "parallel_tool_calls": True,
                  "tool_choice": "auto", "reasoning": {"effort": "max", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
                  "tools": [{"type": "function", "name": n, "description": d, "parameters": p} for n, d, p in TOOLS]}),
}
lengths = {}
for face, (path, body) in faces.items():
    whole = post(path, body)
    usage = whole["usage"]
    lengths[face] = usage.get("prompt_tokens", usage.get("input_tokens"))
    text = json.dumps(whole, ensure_ascii=False)
    check("get_weather" in text and "Paris" in text, f"{face}: the last turn is a call: {text}")
    stream = post(path, {**body, "stream": True})
    end = {"chat": "[DONE]", "messages": "message_stop", "responses": "response.completed"}[face]
    check("get_weather" in stream and end in stream, f"{face}: and so it is streamed: {stream}")
check(len(set(lengths.values())) == 1, f"one history, one prompt: {lengths}")
print(lengths)
print("all checks passed")
