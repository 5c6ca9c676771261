"""Drives a server with the official `openai` package: openai_client.py http://HOST:PORT"""

import asyncio
import sys

import openai

BASE = sys.argv[1]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def question(text):
    return [{"role": "user", "content": text}]


models = client.models.list().data
check(len(models) == 1, "one model is served")
model = models[0].id
check(client.models.retrieve(model).id == model, "the model can be retrieved")

answer = client.chat.completions.create(model=model, messages=question("What is the capital of France?"), temperature=0)
message = answer.choices[0].message
check("Paris" in message.content, f"Paris: {message.content!r}")
check(answer.choices[0].finish_reason == "stop", "finish_reason stop")
check(message.reasoning_content and message.reasoning, "both spellings of the reasoning")
check(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, "usage adds up")

text, usage, roles, reasons = "", None, [], []
stream = client.chat.completions.create(
    model=model, messages=question("What is the capital of France?"), temperature=0, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.usage:
        usage = chunk.usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        roles += [choice.delta.role] if choice.delta.role else []
        reasons += [choice.finish_reason] if choice.finish_reason else []
check(text == message.content, "streamed text equals the whole")
check(usage is not None and usage.completion_tokens == answer.usage.completion_tokens, "usage chunk")
check(roles == ["assistant"] and reasons == ["stop"], f"one role, one finish reason: {roles} {reasons}")

completion = client.completions.create(model=model, prompt="Hello", max_tokens=5, temperature=0, logprobs=2)
check(len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens, "completion logprobs")

scored = client.chat.completions.create(model=model, messages=question("Hello!"), temperature=0, max_tokens=4, logprobs=True, top_logprobs=2)
check(all(len(token.top_logprobs) == 2 for token in scored.choices[0].logprobs.content), "chat logprobs")

several = client.chat.completions.create(model=model, messages=question("Tell me a story."), n=3, seed=5, temperature=1.0, max_tokens=20)
check([choice.index for choice in several.choices] == [0, 1, 2], "three choices")

try:
    client.chat.completions.create(model=model, messages=[], temperature=0)
    check(False, "no messages must be refused")
except openai.BadRequestError as error:
    check(error.body and error.body["message"], "the error body is parsed")

try:
    client.completions.create(model=model, prompt=[5] * 100_000, max_tokens=1)
    check(False, "too long must be refused")
except openai.BadRequestError as error:
    check(error.code == "context_length_exceeded", f"code {error.code}")

with client.chat.completions.create(model=model, messages=question("Count to twenty."), stream=True) as early:
    for _ in early:
        break  # leaving the block closes the connection


async def together():
    fellow = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
    asks = [fellow.chat.completions.create(model=model, messages=question(f"What is {i} + 4?"), temperature=0) for i in range(10, 18)]
    answers = await asyncio.gather(*asks)
    for i, one in zip(range(10, 18), answers):
        check(str(i + 4) in one.choices[0].message.content, f"{i} + 4: {one.choices[0].message.content!r}")


asyncio.run(together())
print("all checks passed")
