"""Ask a vision-language model instead of a person: yes, no or unsure about each frame.

Any server that speaks OpenAI's chat completions will do. The key, from OPENAI_API_KEY, is neither
printed nor saved. The client retries after status 429 or 5xx, a timeout or a lost connection.
"""

import asyncio
import functools
import os
import re
from collections import Counter
from contextlib import closing

from clip_reward import RunError, UsageError, shorten
from evaluation import datasets, figures, runs
from training.run import say

AT_ONCE, RETRIES, TIMEOUT_S = 8, 6, 180
ANSWERS = {"yes": True, "no": False, "unsure": None, "unreadable": None}
QUESTION = """Does the picture show this: {}?
{}
Pictures side by side are views of one moment. Answer with one word as JSON, {{"answer": "yes"}},
{{"answer": "no"}} or {{"answer": "unsure"}}, and nothing else."""
SCHEMA = {"type": "object", "required": ["answer"], "additionalProperties": False}
SCHEMA["properties"] = {"answer": {"type": "string", "enum": ["yes", "no", "unsure"]}}
FORMAT = {"name": "answer", "strict": True, "schema": SCHEMA}
# the requested JSON, or only the word; the thoughts of a reasoning model may stand before it
ANSWER = r"(?is)(\s*<think>.*</think>)?\W*(json)?\W*(answer\b\W*)?(?P<word>yes|no|unsure)\W*"


def ask(session, indices, model, url, use):
    """Call `use(index, answer)` (True, False, None) for each frame of a label_page.Session in turn,
    AT_ONCE requests at once; url None: OPENAI_BASE_URL, or else OpenAI's. Raises RunError when the
    server keeps failing or none of the first answers can be read, UsageError without openai."""
    try:
        import openai
    except ImportError as error:
        raise UsageError('--by needs the openai client: pip install ".[vlm]"') from error
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key.isascii():
        raise UsageError("OPENAI_API_KEY has characters that no key has")
    settings = {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": FORMAT}}
    text = {"type": "text", "text": QUESTION.format(session.task.name, session.task.criterion)}
    tally = Counter(dict.fromkeys((*ANSWERS, "calls", "tokens"), 0))

    async def answer(client, draw, index):
        """Return the model's answer, whatever it is."""
        picture = {"type": "image_url", "image_url": {"url": session.data_url(index, draw)}}
        asked = {"model": model, "messages": [{"role": "user", "content": [picture, text]}]}
        create = client.chat.completions.with_raw_response.create
        try:
            response = await create(**asked, **settings)
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            response = await create(**asked)  # a server without structured output, perhaps
            settings.clear()
        tally["calls"] += 1 + response.retries_taken
        try:
            reply = response.parse()
            tally["tokens"] += reply.usage.total_tokens if reply.usage else 0
            return str(reply.choices[0].message.content)
        except (AttributeError, LookupError, TypeError, ValueError):
            return "no chat completion"

    async def run(draw):
        options = {"max_retries": RETRIES, "timeout": TIMEOUT_S, "base_url": url}
        async with openai.AsyncOpenAI(api_key=key or "none", **options) as client:
            for k in range(0, len(indices), AT_ONCE):
                batch = indices[k : k + AT_ONCE]
                tasks = (answer(client, draw, index) for index in batch)
                found = await asyncio.gather(*tasks, return_exceptions=True)
                for index, said in zip(batch, found):
                    if isinstance(said, BaseException):
                        raise said
                    read = re.fullmatch(ANSWER, said)
                    word = read["word"].lower() if read else "unreadable"
                    tally[word] += 1
                    use(index, ANSWERS[word])
                if k == 0 and tally["unreadable"] == AT_ONCE:
                    raise openai.OpenAIError(f"no answer is yes, no or unsure; one is {said!r}")
                counts = ", ".join(f"{count} {word}" for word, count in tally.items())
                say(f"{k + len(batch)} of {len(indices)}: {counts}")

    with closing(runs.make_scorer(session.dataset.args)) as scorer:
        try:
            asyncio.run(run(functools.partial(scorer.render, size=480)))
        except openai.OpenAIError as error:
            problem = " ".join(f"{error} {error.__cause__ or ''}".split()).replace(
                key or "\n", "***"
            )
            again = "to continue, type the same command"
            raise RunError(f"--by {model}: {shorten(problem, 200)} ({again})") from None


def check(session, model, url, count):
    """Compare a model's answers to `count` frames of a session with a person's labels in its file,
    or else with the judge's. Print agreement and confusion, draw the disagreements; save none."""
    from scipy.stats import binomtest  # takes a second

    data, task, path = session.dataset, session.task, session.path
    whose = datasets.labellers(path, data, task.name) if path.exists() else {}
    truth = {k: good for k, good in session.answers.items() if not whose[k]}
    source = f"a person's labels in {path}" if truth else "the judge"
    truth = truth or dict(enumerate(task.judge(data.states).astype(bool).tolist()))
    rows, given = [k for k in session.order if k in truth][:count], {}
    ask(session, rows, model, url, given.__setitem__)
    say(f"{model} against {source}, {len(rows)} frames:")
    table = Counter((truth[k], given[k]) for k in rows)
    for name, good in ("good", True), ("not good", False):
        yes, no, neither = (table[good, answer] for answer in (True, False, None))
        say(f"    {name}: {yes} yes, {no} no, {neither} neither")
    sure = [k for k in rows if given[k] is not None]
    wrong = [k for k in sure if given[k] != truth[k]]
    if sure:
        same = binomtest(len(sure) - len(wrong), len(sure))
        low, high = same.proportion_ci(method="wilson")
        share = f"{same.statistic:.0%} (95% interval {low:.0%} to {high:.0%})".replace("%", " %")
        say(f"agreement: {share} of the {len(sure)} answers that are yes or no")
    if wrong:
        sheet = datasets.results_folder(data.folder / "check") / "disagreements.png"
        numbers, good = map(str, wrong), map(truth.get, wrong)
        figures.draw_sheet(sheet, data.args, data.states[wrong], numbers, good)
        say(f"wrote {sheet} (green: good states, for which the model said no)")
