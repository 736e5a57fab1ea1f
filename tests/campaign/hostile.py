"""The part of the campaign that reads bad results files."""

import contextlib
import copy
import functools
import io
import json
import operator
import random
import tempfile
from pathlib import Path

from fewkeys import cli
from integrations.test_report import BYTES, VALUES, Skipped, places, report


def reports(seed):
    """`fewkeys report` of a results file with missing or changed values shows them or refuses them in one line."""
    draw = random.Random(seed)
    data = report(skipped=[Skipped("window", 16, "because")]).with_settings(text=["a.txt"]).to_dict()
    for _ in range(draw.randint(1, 4)):
        *way, last = draw.choice(places(data)[1:])
        inner = functools.reduce(operator.getitem, way, data)
        if draw.random() < 0.4:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(
                draw.choice([*VALUES, *map(str, VALUES), draw.uniform(-1e9, 1e9), data.get("rows")])
            )
    content = draw.choice(BYTES) if draw.random() < 0.02 else json.dumps(data).encode()
    if draw.random() < 0.1:
        content = content[: draw.randrange(len(content) + 1)]
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        path.write_bytes(content)
        more = ["--html", str(Path(folder) / "page.html")] if draw.random() < 0.1 else []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["report", str(path), *more])
    message = err.getvalue()
    if code not in (0, 2) or (code == 2) != bool(message) or message.count("\n") > 1:
        return f"code {code}: {message[:200]!r}"
    return None
