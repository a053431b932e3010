"""`recap study` makes a blind study of pairs of videos, serves it to raters, and reports what they prefer."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from recap.cli.console import progress_bar, show_notice
from recap.cli.examples import EXAMPLES
from recap.cli.options import Host, OpenPage, Port, Token
from recap.errors import refuse
from recap.eval.study.box import BallotBox
from recap.eval.study.findings import COUNTED
from recap.show.study_page import PAGE, PARTS
from recap.studio.listening import bound_socket, check_packages, page_address, serve_app
from recap.studio.settings import StudioSettings
from recap.studio.voting import make_voting_app
from recap.tables.study.folder import STUDY, VIDEOS, StudyAsk, make_study, read_questions, read_study
from recap.tables.study.report import write_report

app = typer.Typer(
    no_args_is_help=True, help="Ask people which of two videos is better.", rich_markup_mode=None
)


@app.command("make", epilog=EXAMPLES["study make"])
def make_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs or comparisons, folders with such in them, or MEMORY/ with <prompt>-<seed>.mp4."
        ),
    ],
    pairs: Annotated[int, typer.Option(help="Pairs that every rater sees, besides the checks.")] = 24,
    questions: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of consistency,motion,overall (the default: all three), or NAME=TEXT; repeatable."
        ),
    ] = None,
    ours: Annotated[str, typer.Option(help="The memory that every other one is compared with.")] = "recap",
    repeats: Annotated[
        int | None, typer.Option(help="Pairs that are shown twice [default: an eighth].")
    ] = None,
    identical: Annotated[
        int | None, typer.Option(help="Pairs of one video with itself [default: an eighth].")
    ] = None,
    title: Annotated[str, typer.Option(help="What raters see at the top.")] = "Which video is better?",
    seed: Annotated[int, typer.Option(help="Seed that chooses pairs if there are more than needed.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for raters, new or empty.")] = Path("study"),
    key: Annotated[
        Path | None,
        typer.Option(help="File that lists which memory made which video [default: OUT.key.json]."),
    ] = None,
) -> None:
    """Make a study: a folder of plain files for raters, and a key for you.

    Videos are paired by prompt, length, model and seed. Give raters the folder, never the key.
    """
    ask = StudyAsk(pairs, read_questions(questions or []), ours, repeats, identical, title, seed)
    key = key or out.resolve().with_name(f"{out.resolve().name}.key.json")
    with progress_bar("copying", "videos") as reporter:
        made = make_study(runs, out, key, ask, reporter.progress)
    show_notice(
        f"study {made.study.digest}: {made.study.trials} pairs a rater, {ours} against {', '.join(made.rivals)}"
    )
    show_notice(f"key: {key} (keep it: it shows which memory made which video)")
    typer.echo(out / PAGE)


@app.command("serve", epilog=EXAMPLES["study serve"])
def serve_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a study.")],
    votes: Annotated[Path, typer.Option(help="File to which votes are added.")] = Path("votes.jsonl"),
    port: Port = 8766,
    host: Host = "127.0.0.1",
    token: Token = "",
    browser: OpenPage = True,
) -> None:
    """Show a study to raters and collect their votes in a file."""
    check_packages("recap study serve")
    if votes.resolve().is_relative_to(folder.resolve()):
        limit = f"lies in {folder}, which raters see"
        raise refuse("--votes", str(votes), limit, "choose a file outside of it")
    study = read_study(folder)
    box = BallotBox(votes, study)
    files = [PAGE, *PARTS, STUDY, *(f"{VIDEOS}/{file}" for pair in study.pairs.values() for file in pair)]
    settings = StudioSettings(folder, host=host, port=port, token=token)
    with bound_socket(settings) as listening:
        address = page_address(settings, listening)
        show_notice(f"study: {address} (end it with Ctrl-C), votes: {votes}")
        if browser:
            threading.Timer(1.0, webbrowser.open, (address,)).start()
        serve_app(make_voting_app(folder, files, box, settings), settings, listening)


@app.command("report", epilog=EXAMPLES["study report"])
def report_command(
    votes: Annotated[list[Path], typer.Argument(help="Files of votes, of a server or saved by raters.")],
    key: Annotated[Path, typer.Option(help="The key that was made with the study.")],
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("study-report"),
) -> None:
    """Report what raters prefer: win rates next to the paper's, with intervals, agreement and failed checks."""
    page, made, ballots, found = write_report(votes, key, out)
    for ballot in ballots:
        if ballot.rater.endswith(f"({ballot.session[:6]})"):
            show_notice(f"{ballot.rater}: several raters gave this name; they count as several")
    for facts in found.raters:
        if facts.status != COUNTED:
            show_notice(f"{facts.rater} is left out: {facts.status}")
    show_notice(f"{len(ballots)} raters, {made.ours} against {', '.join(made.rivals)}")
    typer.echo(page)
