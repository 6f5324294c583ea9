"""New files for a trained model, read as ``fedcli predict`` reads them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedcli.data.archives import archives
from fedcli.data.own.new_inputs import NewInputs, how_of, new_files, read_file
from fedmodels.nets.trained import ModelFacts


def read_new(paths: Sequence[Path], facts: ModelFacts, model: object) -> Iterator[NewInputs]:
    how = how_of(facts, model)
    with archives() as packed:
        for file in new_files(paths, how, packed):
            yield from read_file(file, facts, how, (), packed)
