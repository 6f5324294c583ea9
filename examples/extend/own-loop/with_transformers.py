"""A ``Trainer`` of Hugging Face with a PEFT adapter in a run; ``# fedtide`` marks the added lines.

pip install transformers peft accelerate

fedsrv serve quickstart --listen 127.0.0.1:5055 --out run \
    --set method.name=fedavg --set net.name=examples/extend/own-loop/adapted.py:Adapted
python examples/extend/own-loop/with_transformers.py 127.0.0.1:5055 0 DATA  # by fedcli partition
"""

import sys
import tempfile
from pathlib import Path

from adapted import Adapted
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

import fedtide  # fedtide


class WithLoss(nn.Module):
    """A net for ``Trainer``: with labels, it also returns the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        """Return the loss and the logits of a batch."""
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


server, client_id, data = sys.argv[1], int(sys.argv[2]), sys.argv[3]  # fedtide
net_file = Path(__file__).with_name("adapted.py")  # fedtide
model = Adapted()
how = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=8, learning_rate=0.01, per_device_train_batch_size=16,
    report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
for task in fedtide.client(server, client_id, data, code=[net_file]):  # fedtide
    task.load(model)  # fedtide
    examples = [{"x": x, "labels": y} for x, y in task.data]
    done = Trainer(WithLoss(model), how, train_dataset=examples).train()
    task.send(model, loss=done.training_loss)  # fedtide
