"""`nanoserve bench warm`: how many recordings a run makes that finds none, where they are paid for (in a client's
latency or at the start), and which shapes a memory budget holds.
"""

from __future__ import annotations

import argparse

from nanoserve.bench.flags import check_flags
from nanoserve.bench.subject import Subject
from nanoserve.bench.tables import publish
from nanoserve.bench.warm_picture import draw
from nanoserve.bench.warm_tables import Serving, budget_table, cold_table, paid_table


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    serving = Serving(
        rows=args.serving_rows,
        width=args.serving_width,
        multiple=args.serving_multiple,
        seconds_per_graph=args.seconds_per_graph,
        trim_rows=args.trim_rows,
        trim_width=args.trim_width,
    )
    subject = Subject.load(args)
    cold = cold_table(subject, rows=args.rows, prompt_tokens=args.prompt_tokens, lengths=args.generated)
    paid = paid_table(serving, args.serving_generated)
    budgets = budget_table(serving, heads=args.heads, budgets_mb=args.budget_mb)
    picture = (args.picture, draw(subject.describe(), serving, cold, paid, budgets)) if args.picture else None
    summary = {**subject.summary(), "rows": args.rows, "prompt_tokens": args.prompt_tokens}
    publish("warm", subject.describe(), [cold, paid, budgets], summary, csv_folder=args.csv, picture=picture)
    return 0
