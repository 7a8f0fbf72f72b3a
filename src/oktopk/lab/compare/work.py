"""All that `oktopk compare` does: it trains cells that are not finished, and shows the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from ...common.cache import expanded
from ...common.errors import UserError, printable
from ...common.format import plural
from ...train.launch.place import place
from ..interruption import terminated_like_interrupted
from . import page
from .folder import Folder, merged
from .grid import Cell, Grid, check
from .progress import GridProgress
from .results import FAILED, CellRecord, Comparison, compare, first_sentence
from .running import CellError, Run, drop_checkpoint
from .setting import Setting
from .tables import qualities_line, report
from .trained import Trained, read_trained


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    if args.report_only is not None:
        return _report_only(args)
    if place() is not None:
        raise UserError(
            "start `oktopk compare` without torchrun, mpirun or srun: it starts the workers itself"
        )
    grid = check(args)
    folder = Folder(expanded(args.dir or f"runs/compare-{args.recipe}"))
    folder.check_usable()
    with terminated_like_interrupted(), folder.locked():
        return _Work(args, grid, folder).run()


class _Work:
    """The cells of a command, among all that are in the folder."""

    def __init__(self, args: argparse.Namespace, grid: Grid, folder: Folder) -> None:
        self._args, self._folder, self._setting = args, folder, grid.setting
        self._cells = grid.cells()
        kept = folder.load()
        if kept and (difference := grid.setting.difference(kept.setting)):
            if any(folder.has_steps(record.name) for record in kept.cells):
                raise UserError(
                    f"--dir {folder.path} holds a comparison with {difference}: name another --dir"
                )
            kept = None  # not one step was taken with settings that were perhaps a mistake
        records = merged(kept.cells if kept else [], self._cells)
        self._all = _Known(self._setting, folder, records)

    def run(self) -> int:
        waiting = [cell for cell in self._cells if cell.name not in self._all.trained]
        self._compare()  # a mistake here need not wait for data
        if waiting:
            waiting[0].config(self._setting).workload.prepare(sys.stderr.isatty())
        self._save()
        done = len(self._cells) - len(waiting)
        try:
            with GridProgress(len(self._cells), done) as progress:
                failed = [cell for cell in waiting if not self._train(cell, progress)]
        except KeyboardInterrupt:
            self._tell_interrupted()
            return 130
        _show(self._save(), self._folder)
        return 1 if failed else 0

    def _train(self, cell: Cell, progress: GridProgress) -> bool:
        """Whether it went well."""
        args, path = self._args, self._folder.cell(cell.name)
        progress.begin(cell.name)
        try:
            config = cell.config(self._setting)
            Run(config, path, self._setting.links, args.timeout).train(progress.stepped)
            trained = read_trained(path)
        except (CellError, UserError) as error:
            self._all.failed(cell, str(error))
            progress.end(f"failed: {first_sentence(str(error))}", failed=True)
            self._save()
            return False
        if args.drop_checkpoints:
            drop_checkpoint(path)
        self._all.trained[cell.name] = trained
        comparison = self._save()
        progress.end(qualities_line(trained.result, comparison.metrics()))
        return True

    def _save(self) -> Comparison:
        comparison = self._compare()
        self._folder.save(comparison)
        return comparison

    def _compare(self) -> Comparison:
        return self._all.compare(self._args.baseline, self._args.target_loss)

    def _tell_interrupted(self) -> None:
        done = sum(cell.name in self._all.trained for cell in self._cells)
        print(
            f"oktopk: interrupted; {done} of {plural(len(self._cells), 'cell')} are finished, and "
            "the same command goes on",
            file=sys.stderr,
        )


class _Known:
    """All cells of a folder, and the results of those that are finished."""

    def __init__(self, setting: Setting, folder: Folder, records: Sequence[CellRecord]) -> None:
        self._setting = setting
        self._records = {record.name: record for record in records}
        self.trained: dict[str, Trained] = {}
        for record in records:
            if folder.is_finished(record.cell, record.cell.config(setting)):
                self.trained[record.name] = read_trained(folder.cell(record.name))

    def failed(self, cell: Cell, why: str) -> None:
        record = self._records[cell.name]
        self._records[cell.name] = replace(record, state=FAILED, why=why)

    def compare(self, baseline: str | None, target_loss: float | None) -> Comparison:
        records = list(self._records.values())
        return compare(self._setting, records, self.trained, baseline, target_loss)


def _report_only(args: argparse.Namespace) -> int:
    folder = Folder(expanded(args.report_only))
    kept = folder.load()
    if kept is None:
        raise UserError(f"--report-only {folder.path}: no comparison is there")
    known = _Known(kept.setting, folder, merged(kept.cells, []))
    baseline = args.baseline or kept.baseline
    target_loss = kept.target_loss if args.target_loss is None else args.target_loss
    _show(known.compare(baseline, target_loss), folder)
    return 0


def _show(comparison: Comparison, folder: Folder) -> None:
    print(report(comparison), flush=True)
    written = None
    try:
        written = page.write(comparison, folder)
    except Exception as error:  # hours of training and their table are there
        why = str(error) or type(error).__name__
        print(printable(f"oktopk: the report page is not written: {why}"), file=sys.stderr)
    print(f"results are in {folder.path}" + (f", as a page in {written}" if written else ""))
