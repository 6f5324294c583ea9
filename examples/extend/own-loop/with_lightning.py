"""A training script for Lightning that participates in a run; ``# fedtide`` marks the added lines.

pip install fedtide[lightning]; the coordinator is that of with_torch.py.

python examples/extend/own-loop/with_lightning.py 127.0.0.1:5055 0 DATA
"""

import sys
from pathlib import Path

import lightning
import torch
from net import Net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import fedtide  # fedtide


class Classifier(lightning.LightningModule):
    """The net, its loss and its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimiser."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


server, client_id, data = sys.argv[1], int(sys.argv[2]), sys.argv[3]  # fedtide
net_file = Path(__file__).with_name("net.py")  # fedtide
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
model = Classifier()
for task in fedtide.client(server, client_id, data, code=[net_file]):  # fedtide
    task.load(model.net)  # fedtide
    batches = DataLoader(task.data, batch_size=16, shuffle=True)  # fedtide
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(model, batches)
    task.send(model.net, loss=trainer.logged_metrics["loss"])  # fedtide
