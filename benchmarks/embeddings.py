"""t-SNE of a finished run's embeddings, as figure 5 of FedMLP: drawn where its report shows it.

    python -m benchmarks.embeddings RUN [RUN …] [--images 500]

The net is client 0's model as the run left it, the images are of the global test set. The picture
goes to ``RUN/clients/0/pictures/t-sne.svg``. A run of as many rounds shows an earlier round.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.measure import parser_of
from fedcli.data.store.client_data import GlobalTest
from fedcli.data.store.stream import global_test_tensors
from fedcli.parts.drawing import draw
from fedmodels.errors import DataError
from fedmodels.nets.split import embeddings
from fedmodels.nets.trained import TrainedModel
from fedmodels.training.pictures import PrototypeMap


def main() -> None:
    """Draw the picture of every run."""
    parser = parser_of("embeddings", __doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--images", type=int, default=500, help="of the test set")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for run in options.runs:
        place = run / "clients" / "0" / "pictures" / "t-sne.svg"
        draw(picture(run, options.images), place)
        print(place)


def picture(run: Path, images: int) -> PrototypeMap:
    """Return where t-SNE puts the embeddings of some test images.

    Raises:
        DataError: the run has no global test set.
    """
    from sklearn.manifold import TSNE  # takes a second to import

    found = GlobalTest.find(run / "data")
    if found is None:
        raise DataError(f"{run / 'data'} has no global test set to draw")
    model = TrainedModel.load(run / "clients" / "0" / "personal.safetensors")
    x, y = global_test_tensors(found)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:images]
    model.net.eval()
    features = embeddings(model.net, x[order]).numpy()
    perplexity = min(30, max(1, len(order) // 4))
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return PrototypeMap(torch.from_numpy(points), y[order], {}, "t-SNE of test images")


if __name__ == "__main__":
    main()
