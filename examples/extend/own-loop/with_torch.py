"""A training script in plain torch that participates in a run; ``# fedtide`` marks the added lines.

fedsrv serve quickstart --listen 127.0.0.1:5055 --out run \
    --set method.name=fedavg --set net.name=examples/extend/own-loop/net.py:Net
python examples/extend/own-loop/with_torch.py 127.0.0.1:5055 0 DATA  # by fedcli partition
"""

import sys
from pathlib import Path

import torch
from net import Net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import fedtide  # fedtide

server, client_id, data = sys.argv[1], int(sys.argv[2]), sys.argv[3]  # fedtide
net_file = Path(__file__).with_name("net.py")  # fedtide
model = Net()
for task in fedtide.client(server, client_id, data, code=[net_file]):  # fedtide
    task.load(model)  # fedtide
    batches = DataLoader(task.data, batch_size=16, shuffle=True)  # fedtide
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for _ in range(2):
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    task.send(model, loss=loss)  # fedtide
