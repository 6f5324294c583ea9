// Softmax regression on a client's data, as `fedcli partition` writes them. Nothing here knows the
// protocol: another model would take the place of this file.
'use strict';
const fs = require('fs');
const path = require('path');

// Reads an array of numpy: uint8, uint16, float32, float64 or int64, in C order.
function npy(file) {
  const bytes = fs.readFileSync(file), size = bytes.readUInt16LE(8);
  const head = bytes.toString('latin1', 10, 10 + size), body = bytes.subarray(10 + size);
  const [, dtype] = /'descr': '[|<](\w+)'/.exec(head);
  const [width, read] = { u1: [1, (i) => body[i]], u2: [2, (i) => body.readUInt16LE(2 * i)],
    f4: [4, (i) => body.readFloatLE(4 * i)], f8: [8, (i) => body.readDoubleLE(8 * i)],
    i8: [8, (i) => Number(body.readBigInt64LE(8 * i))] }[dtype];
  return Float64Array.from({ length: body.length / width }, (_, i) => read(i));
}

// Reads the normalised inputs x and the labels y of a task; part is train or test.
function examples(folder, { scale, mean, std, input_shape: shape }, task, part) {
  const at = (kind) => npy(path.join(folder, `task-${task}`, `${part}_${kind}.npy`));
  const x = at('x'), inner = shape.length === 3 ? shape[1] * shape[2] : 1; // values of a channel
  const of = (list, i) => list[list.length === 1 ? 0 : Math.floor(i / inner) % list.length];
  return { x: x.map((v, i) => (v / scale - of(mean, i)) / of(std, i)), y: at('y') };
}

// Returns the probabilities of the classes of example n.
function predict(weights, x, n) {
  const W = weights['head/weight'].values, b = weights['head/bias'].values, D = W.length / b.length;
  const z = Array.from(b, (bias, k) => {
    let sum = bias;
    for (let d = 0; d < D; d++) sum += W[k * D + d] * x[n * D + d];
    return sum;
  });
  const most = Math.max(...z), e = z.map((v) => Math.exp(v - most));
  const total = e.reduce((a, c) => a + c);
  return e.map((v) => v / total);
}

// Trains with plain SGD, batch after batch; returns the mean loss of the last epoch. Before each
// epoch it awaits beat(epoch).
async function train(weights, { x, y }, { local_epochs, batch_size, lr }, beat) {
  const W = weights['head/weight'].values, b = weights['head/bias'].values, D = W.length / b.length;
  let loss;
  for (let epoch = 0; epoch < local_epochs; epoch++) {
    await beat(epoch);
    loss = 0;
    for (let first = 0; first < y.length; first += batch_size) {
      const last = Math.min(first + batch_size, y.length), gradients = [];
      for (let n = first; n < last; n++) {
        gradients.push(predict(weights, x, n));
        loss -= Math.log(gradients.at(-1)[y[n]]) / y.length;
        gradients.at(-1)[y[n]] -= 1;
      }
      const step = lr / (last - first);
      gradients.forEach((g, i) => g.forEach((slope, k) => {
        b[k] -= step * slope;
        for (let d = 0; d < D; d++) W[k * D + d] -= step * slope * x[(first + i) * D + d];
      }));
    }
  }
  return loss;
}

// Counts, for each class, the examples, the predictions and the right ones; and sums the loss.
function score(weights, { x, y }) {
  const classes = weights['head/bias'].values.length;
  const [support, predicted, correct] = [0, 1, 2].map(() => new Array(classes).fill(0));
  let loss_sum = 0;
  y.forEach((label, n) => {
    const p = predict(weights, x, n), best = p.indexOf(Math.max(...p));
    support[label]++, predicted[best]++;
    if (best === label) correct[label]++;
    loss_sum -= Math.log(p[label]);
  });
  return { support, predicted, correct, loss_sum };
}

module.exports = { examples, train, score };
