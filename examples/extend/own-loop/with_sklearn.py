"""A model of scikit-learn with ``partial_fit`` in a run; ``# fedtide`` marks the added lines.

The model is linear, like the run's net. ``SGDClassifier`` is one-versus-rest, so it predicts the
same class as the run's net, with other probabilities. It needs at least three classes, because with
two ``SGDClassifier`` keeps one row and the net two.

fedsrv serve quickstart --listen 127.0.0.1:5055 --out run \
    --set method.name=fedavg --set net.name=examples/extend/own-loop/linear.py:Linear
python examples/extend/own-loop/with_sklearn.py 127.0.0.1:5055 0 DATA  # by fedcli partition
"""

import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

import fedtide  # fedtide

server, client_id, data = sys.argv[1], int(sys.argv[2]), sys.argv[3]  # fedtide
net_file = Path(__file__).with_name("linear.py")  # fedtide
model = SGDClassifier(learning_rate="constant", eta0=0.01, loss="log_loss", random_state=0)
for task in fedtide.client(server, client_id, data, code=[net_file]):  # fedtide
    x, y = (tensor.numpy() for tensor in task.data.tensors)
    x, head = x.reshape(len(x), -1), task.model.head  # fedtide
    classes = np.arange(len(head.bias))
    model.partial_fit(x[:1], y[:1], classes)  # allocates the weights
    model.coef_, model.intercept_ = (np.array(p.detach()) for p in head.parameters())  # fedtide
    for _ in range(5):
        model.partial_fit(x, y)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(model.coef_))  # fedtide
        head.bias.copy_(torch.tensor(model.intercept_))  # fedtide
    task.send(loss=log_loss(y, model.predict_proba(x), labels=classes))  # fedtide
