"""Ask a vision-language model instead of a person: yes, no or unsure about each frame.

The server may be any that speaks OpenAI's chat completions. The key is read from OPENAI_API_KEY and
is neither printed nor saved; a local server needs none. The client itself repeats what fails by
429, 5xx, a timeout or a cut connection, and waits longer each time.
"""

import asyncio
import functools
import os
import re
from collections import Counter, deque
from contextlib import closing

import numpy as np

from clip_reward import RunError, UsageError, shorten
from evaluation import figures
from evaluation.datasets import labellers, results_folder
from evaluation.runs import make_scorer
from training.run import say

AT_ONCE, RETRIES, TIMEOUT_S = 8, 6, 180
ANSWERS = {"yes": True, "no": False, "unsure": None}
QUESTION = """Does the picture show this: {}?
{}
Pictures side by side are views of one moment. Answer with one word as JSON, {{"answer": "yes"}},
{{"answer": "no"}} or {{"answer": "unsure"}}, and nothing else."""
SCHEMA = {"type": "object", "required": ["answer"], "additionalProperties": False}
SCHEMA["properties"] = {"answer": {"type": "string", "enum": list(ANSWERS)}}
STRUCTURED = {"name": "answer", "strict": True, "schema": SCHEMA}
# the JSON that was asked for, or the word alone, after what a reasoning model has thought
ANSWER = r"(?is)(\s*<think>.*</think>)?\W*(json)?\W*(answer\b\W*)?(?P<word>yes|no|unsure)\W*"


def ask(session, indices, model, url, use):
    """Call `use(index, answer)` (True, False, None) for each frame of a label_page.Session in turn,
    AT_ONCE requests at once; url None: OPENAI_BASE_URL, or else OpenAI's. Raises RunError when the
    server fails for good or none of the first answers can be read, UsageError without a client."""
    try:
        import openai
    except ImportError as error:
        raise UsageError("--by needs the openai client: pip install '.[vlm]'") from error
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key.isascii():
        raise UsageError("OPENAI_API_KEY has characters that no key has")
    structured = {"type": "json_schema", "json_schema": STRUCTURED}
    settings = {"temperature": 0, "response_format": structured}
    question = {"type": "text"}
    question["text"] = QUESTION.format(session.task.name, session.task.criterion)
    tally, answers = Counter(), Counter()

    async def count(request):
        tally["calls"] += 1

    async def answer(client, picture):
        text = "no chat completion"
        content = [{"type": "image_url", "image_url": {"url": picture}}, question]
        messages = [{"role": "user", "content": content}]
        create = functools.partial(client.chat.completions.create, model=model, messages=messages)
        try:
            try:
                reply = await create(**settings)
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                reply = await create()  # a server without structured output, perhaps
                settings.clear()
            tally["tokens"] += reply.usage.total_tokens if reply.usage else 0
            text = reply.choices[0].message.content
            found = ANSWERS[re.fullmatch(ANSWER, text)["word"].lower()]
        except openai.OpenAIError as error:  # asyncio would log one that nobody awaits
            return error
        except (AttributeError, LookupError, TypeError, ValueError):  # of any other body or text
            tally["unreadable"] += 1
            if tally["unreadable"] == AT_ONCE and not tally["read"]:
                return openai.OpenAIError(f"no answer is yes, no or unsure, but {text!r}")
            return None
        tally["read"] += 1
        return found

    async def run(draw):
        hooks = openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]})
        options = {"max_retries": RETRIES, "timeout": TIMEOUT_S, "http_client": hooks}
        async with openai.AsyncOpenAI(api_key=key or "none", base_url=url, **options) as client:
            asked = deque()
            for k in range(len(indices) + AT_ONCE):  # the last AT_ONCE times nothing new is asked
                if k >= AT_ONCE and asked:
                    index, task = asked.popleft()
                    if isinstance(found := await task, Exception):
                        raise found
                    answers[found] += 1
                    use(index, found)
                    if (done := answers.total()) % 20 == 0 or done == len(indices):
                        counts = ", ".join(f"{answers[ANSWERS[word]]} {word}" for word in ANSWERS)
                        used = "{unreadable} not readable; {calls} calls, {tokens} tokens"
                        used = used.format_map(Counter(tally))
                        say(f"{done} of {len(indices)}: {counts}, of which {used}")
                if k < len(indices):
                    picture = session.data_url(indices[k], draw)
                    asked.append((indices[k], asyncio.create_task(answer(client, picture))))
                    await asyncio.sleep(0)  # sends it before the next picture is drawn

    with closing(make_scorer(session.dataset.args)) as scorer:
        try:
            asyncio.run(run(functools.partial(scorer.render, size=480)))
        except openai.OpenAIError as error:
            problem = " ".join(f"{error} {error.__cause__ or ''}".split())
            problem = problem.replace(key, "***") if key else problem
            again = "the same command goes on where this one stopped"
            raise RunError(f"--by {model}: {shorten(problem, 200)} ({again})") from None


def check(session, model, url, count):
    """Compare a model's answers to `count` frames of a session with a person's labels in its file,
    or else with the judge's. Print agreement and confusion, draw the disagreements; save none."""
    from scipy.stats import binomtest  # takes a second

    data, task, whose = session.dataset, session.task, {}
    if session.path.exists():
        whose = labellers(session.path, data, task.name)
    truth = {k: good for k, good in session.answers.items() if not whose.get(k)}
    source = f"a person's labels in {session.path}" if truth else "the judge"
    truth = truth or dict(enumerate(task.judge(data.states).astype(bool).tolist()))
    rows, given = [k for k in session.order if k in truth][:count], {}
    ask(session, rows, model, url, given.__setitem__)
    table = Counter((truth[k], given[k]) for k in rows)
    same, sure = table[True, True] + table[False, False], sum(given[k] is not None for k in rows)
    say(f"{model} against {source}, {len(rows)} frames:")
    for name, good in ("good", True), ("not good", False):
        counts = ", ".join(f"{table[good, ANSWERS[word]]} {word}" for word in ANSWERS)
        say(f"    {name}: {counts}")
    if sure:
        low, high = 100 * np.array(binomtest(same, sure).proportion_ci(method="wilson"))
        share = f"{100 * same / sure:.0f} % (95 % interval {low:.0f} to {high:.0f} %)"
        say(f"agreement {share} of the {sure} answers that are not unsure")
    if wrong := [k for k in rows if given[k] not in (truth[k], None)]:
        with closing(make_scorer(data.args)) as scorer:
            frames = scorer.render(data.states[wrong], 120)
        sheet = results_folder(data.folder / "check") / "disagreements.png"
        cells = map(figures.framed, frames, map(str, wrong), (truth[k] for k in wrong))
        figures.write_sheet(sheet, cells, 4 if data.args.views > 1 else 10)
        say(f"wrote {sheet} (green: good, and the model said no)")
