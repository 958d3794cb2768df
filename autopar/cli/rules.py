"""`autopar rules`: lists, proves, audits and discovers sharding rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import click
import torch
from rich.table import Table

from autopar.cli.common.console import JSON, print_json, print_out, stages
from autopar.cli.common.model_options import RULES, own_rules
from autopar.errors import RuleError
from autopar.intra_op.proofs.audit import audit
from autopar.intra_op.proofs.case import Failure
from autopar.intra_op.proofs.discover import discover, source
from autopar.intra_op.proofs.prove import Report, prove, prove_forms
from autopar.intra_op.proofs.reference import entry, page
from autopar.intra_op.rule import OpRule, collect, graph_name
from autopar.intra_op.rules import families
from autopar.operators.forms import forms_of


@click.command("rules")
@click.argument("operators", nargs=-1, metavar="[OPERATOR]...")
@click.option("--prove", "proving", is_flag=True, help="Run every example sharded, and compare.")
@click.option("--audit", "auditing", is_flag=True, help="List whole factors that could be split.")
@click.option("--discover", "discovering", is_flag=True, help="Find a rule by running OPERATOR.")
@click.option(
    "--example",
    "examples",
    multiple=True,
    metavar="ARGUMENTS",
    help='Arguments for --discover: "f64[4, 6], f64[6], 2". Repeatable.',
)
@click.option("--markdown", is_flag=True, help="Print the reference page of the rules.")
@RULES
@JSON
@click.pass_context
def command(
    context: click.Context,
    operators: tuple[str, ...],
    proving: bool,
    auditing: bool,
    discovering: bool,
    examples: tuple[str, ...],
    markdown: bool,
    rule_files: tuple[Path, ...],
    as_json: bool,
) -> None:
    """List the sharding rules of all operators, or of the given ones: "aten.mm", "aten.conv*".

    --prove and --audit exit with status 1 if a rule fails.

    \b
    autopar rules --prove aten.linear
    autopar rules --discover aten.addcmul --example "f64[4, 6], f64[4, 6], f64[6]"
    autopar rules --discover mylib::op --example "f64[4, 6]" --rules mylib.py
    """
    if sum((proving, auditing, discovering, markdown)) > 1:
        raise click.UsageError("--prove, --audit, --discover and --markdown exclude one another")
    if examples and not discovering:
        raise click.UsageError("--example needs --discover")
    own = own_rules(rule_files)
    with _one_thread():
        if discovering:
            right = _discover(operators, examples, as_json)
        elif proving:
            right = _prove(_chosen(operators, own), as_json)
        elif auditing:
            right = _audit(_chosen(operators, own), as_json)
        else:
            right = _list(_chosen(operators, own), markdown, as_json)
    context.exit(0 if right else 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread: the examples are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _chosen(operators: tuple[str, ...], own: tuple[OpRule, ...]) -> dict[str, list[OpRule]]:
    """Returns the rules of the given operators by family; raises RuleError if one has no rule."""
    replaced = collect(own)
    chosen = {
        name: [rule for rule in family if rule.op not in replaced]
        for name, family in families().items()
    }
    chosen["own"] = [*replaced.values()]
    patterns = [graph_name(operator) for operator in operators]
    known = [rule.op for family in chosen.values() for rule in family]
    for pattern in patterns:
        if not any(fnmatchcase(op, pattern) for op in known):
            raise RuleError(
                f"there is no rule for {pattern}",
                todo=f"discover one: autopar rules --discover {pattern}",
            )
    wanted = patterns or ["*"]
    picked = {
        name: [rule for rule in family if any(fnmatchcase(rule.op, p) for p in wanted)]
        for name, family in chosen.items()
    }
    return {name: family for name, family in picked.items() if family}


def _each(chosen: dict[str, list[OpRule]], quiet: bool, verb: str) -> Iterator[OpRule]:
    """Yields every rule, and shows the progress on stderr."""
    every = [rule for family in chosen.values() for rule in family]
    with stages(quiet=quiet) as stage:
        for number, rule in enumerate(every, 1):
            stage(f"{verb} {rule.op}, {number} of {len(every)}")
            yield rule


def _list(chosen: dict[str, list[OpRule]], markdown: bool, as_json: bool) -> bool:
    by_op = {rule.op: entry(rule) for rule in _each(chosen, as_json or markdown, "read")}
    if markdown:
        tables = {name: [by_op[rule.op] for rule in family] for name, family in chosen.items()}
        click.echo(page(tables), nl=False)
    elif as_json:
        print_json([asdict(item) for item in by_op.values()])
    else:
        rows = [
            (item.op, item.rule, " ".join(item.splittable), str(item.examples))
            for item in by_op.values()
        ]
        _print_table(("operator", "rule", "splits", "examples"), rows)
    return True


def _prove(chosen: dict[str, list[OpRule]], as_json: bool) -> bool:
    reports = [_report(rule) for rule in _each(chosen, as_json, "prove")]
    wrong = [report for report in reports if not report.proved]
    total = sum(report.strategies for report in reports)
    if as_json:
        print_json([{**asdict(report), "proved": report.proved} for report in reports])
        return not wrong
    for report in wrong:
        click.secho(str(report), fg="red", err=True)
    click.echo(f"{len(reports) - len(wrong)} of {len(reports)} rules proved, {total} strategies")
    return not wrong


def _report(rule: OpRule) -> Report:
    """Proves one rule and its operator's forms; an example that cannot run counts as a failure."""
    try:
        found = prove(rule)
        if not forms_of(rule.op):
            return found
        formed = prove_forms(rule)
        count = found.strategies + formed.strategies
        return Report(rule.op, count, (*found.failures, *formed.failures))
    except RuleError as error:
        where = (rule.op, error.where, "", "", 0)
        return Report(rule.op, 0, (Failure(*where, f"{error.what}: {error.why};", math.inf),))


def _audit(chosen: dict[str, list[OpRule]], as_json: bool) -> bool:
    findings = [finding for rule in _each(chosen, as_json, "audit") for finding in audit(rule)]
    telling = [item for item in findings if item.telling]
    if as_json:
        print_json([asdict(item) for item in telling])
    elif telling:
        rows = [
            (item.op, item.spec, item.factor, "holds" if item.holds else "not tried", item.example)
            for item in telling
        ]
        _print_table(("operator", "rule", "freed", "", "example"), rows)
    if not as_json:
        click.echo(
            f"{len(telling)} of {len(findings)} unsplit factors could be split or were not tried"
        )
    return not telling


def _discover(operators: tuple[str, ...], examples: tuple[str, ...], as_json: bool) -> bool:
    if not operators or (examples and len(operators) > 1):
        raise click.UsageError("--discover needs an operator, and only one if examples are given")
    rules = []
    with stages(quiet=as_json) as stage:
        for operator in operators:
            stage(f"run {operator} in parts")
            rules.append(discover(operator, examples))
    if as_json:
        print_json([asdict(rule) for rule in rules])
    else:
        click.echo("\n".join(map(source, rules)))
    return True


def _print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_out(table)
