// A client of fedtide in another language, made of the schema and docs/protocol.md alone.
//
// node client.js HOST:PORT CLIENT DATA SESSION
//
// It trains softmax regression ([net] name = "mlp", hidden = []) with FedAvg on DATA/CLIENT, as
// `fedcli partition` writes it, and keeps its session in the file SESSION.
'use strict';
const crypto = require('crypto');
const fs = require('fs');
const path = require('path');
const zlib = require('zlib');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTOCOL = 4, ALIGNMENT = 64, FRAME_BYTES = 1 << 20, WHOLE_BYTES = 2 << 20;
const PROTO = path.join(__dirname, '..', '..', 'proto');
const OPTIONS = { includeDirs: [PROTO], keepCase: true, longs: String, enums: String,
  defaults: true, arrays: true, objects: false, oneofs: true };
const { fedpb } = grpc.loadPackageDefinition(
  loader.loadSync('fedpb/v1/coordinator.proto', OPTIONS));
const [address, client_id, data, session_file] = process.argv.slice(2);
const server = new fedpb.v1.CoordinatorService(address, grpc.credentials.createInsecure(),
  { 'grpc.max_receive_message_length': 4 << 20 });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// --- calls ---------------------------------------------------------------------------------------

// Makes a call until it has an outcome; codes and metadata are those of docs/protocol.md, "Errors".
async function patiently(call) {
  for (let wait = 100; ; wait = Math.min(2 * wait, 2000)) {
    try {
      return await call();
    } catch (error) {
      const again = Number(error.metadata?.get('fedtide-again-after-ms')[0] || 0);
      const gone = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED];
      if (!again && !gone.includes(error.code)) throw error;
      await sleep(Math.max(wait, again) * (0.5 + Math.random() / 2));
    }
  }
}

const unary = (name, request) => patiently(() => new Promise((resolve, reject) =>
  server[name](request, (error, answer) => (error ? reject(error) : resolve(answer)))));

const push = (messages) => patiently(() => new Promise((resolve, reject) => {
  const stream = server.Push((error, answer) => (error ? reject(error) : resolve(answer)));
  for (const message of messages) stream.write(message);
  stream.end();
}));

// --- data ----------------------------------------------------------------------------------------

// Reads an array of numpy: uint8, float32 or int64, in C order.
function npy(file) {
  const bytes = fs.readFileSync(file), size = bytes.readUInt16LE(8);
  const head = bytes.toString('latin1', 10, 10 + size), body = bytes.subarray(10 + size);
  const [, dtype] = /'descr': '[|<](\w+)'/.exec(head);
  const [width, read] = { u1: [1, (i) => body[i]], f4: [4, (i) => body.readFloatLE(4 * i)],
    i8: [8, (i) => Number(body.readBigInt64LE(8 * i))] }[dtype];
  return Float64Array.from({ length: body.length / width }, (_, i) => read(i));
}

const description = JSON.parse(fs.readFileSync(path.join(data, client_id, 'client.json')));
const K = description.num_classes, D = description.input_shape.reduce((a, b) => a * b);

function examples(task, part) {
  const at = (kind) => npy(path.join(data, client_id, `task-${task}`, `${part}_${kind}.npy`));
  const { scale, mean, std, input_shape: shape } = description, x = at('x');
  const inner = shape.length === 3 ? shape[1] * shape[2] : 1; // values of a channel that lie together
  const of = (list, i) => list[list.length === 1 ? 0 : Math.floor(i / inner) % list.length];
  return { x: x.map((v, i) => (v / scale - of(mean, i)) / of(std, i)), y: at('y') };
}

// --- tables and bundles --------------------------------------------------------------------------

const valueIn = (value) => value.kind === 'table' ? valuesIn(value.table)
  : value.kind === 'list' ? value.list.values.map(valueIn)
    : value.kind === 'integer' ? Number(value.integer) : value.kind ? value[value.kind] : null;
const valuesIn = (table) => Object.fromEntries(
  table.entries.map(({ key, value }) => [key, valueIn(value)]));

const aligned = (size) => Math.ceil(size / ALIGNMENT) * ALIGNMENT;

// Cuts float32 weights {name: {shape, values}} into the header of a bundle and its frames.
function encode(weights, scalars) {
  const tensors = [], pieces = [];
  let offset = 0;
  for (const [name, { shape, values }] of Object.entries(weights)) {
    tensors.push({ name, dtype: 'DTYPE_FLOAT32', shape, offset });
    pieces.push(Buffer.alloc(aligned(4 * values.length)));
    values.forEach((v, i) => pieces.at(-1).writeFloatLE(v, 4 * i));
    offset += pieces.at(-1).length;
  }
  const payload = Buffer.concat(pieces), frames = [];
  const most = payload.length <= WHOLE_BYTES ? WHOLE_BYTES : FRAME_BYTES;
  for (let at = 0; at < payload.length; at += most) {
    const piece = payload.subarray(at, at + most);
    frames.push({ frame: { offset: at, crc32: zlib.crc32(piece), payload: piece } });
  }
  return { bundle: { weights: { tensors }, scalars, payload_bytes: offset }, frames };
}

// Reads the float32 weights that a header states out of the bytes of its frames.
function decode(header, payload) {
  return Object.fromEntries((header.weights?.tensors ?? []).map(({ name, dtype, shape, offset }) => {
    if (dtype !== 'DTYPE_FLOAT32') throw new Error(`${name} is a ${dtype}`);
    const length = shape.reduce((a, b) => a * Number(b), 1);
    const read = (_, i) => payload.readFloatLE(Number(offset) + 4 * i);
    return [name, { shape, values: Float64Array.from({ length }, read) }];
  }));
}

// --- softmax regression --------------------------------------------------------------------------

// Returns the probabilities of an example's classes.
function predict(weights, x, n) {
  const W = weights['head/weight'].values, b = weights['head/bias'].values;
  const z = Array.from({ length: K }, (_, k) => {
    let sum = b[k];
    for (let d = 0; d < D; d++) sum += W[k * D + d] * x[n * D + d];
    return sum;
  });
  const most = Math.max(...z), e = z.map((v) => Math.exp(v - most)), total = e.reduce((a, c) => a + c);
  return e.map((v) => v / total);
}

// Trains with plain SGD, batch after batch; returns the mean loss of the last epoch. Before each
// epoch it awaits beat(epoch, loss).
async function train(weights, { x, y }, { local_epochs, batch_size, lr }, beat) {
  let loss = 0;
  for (let epoch = 0; epoch < local_epochs; epoch++) {
    await beat(epoch, loss);
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
        weights['head/bias'].values[k] -= step * slope;
        for (let d = 0; d < D; d++) {
          weights['head/weight'].values[k * D + d] -= step * slope * x[(first + i) * D + d];
        }
      }));
    }
  }
  return loss;
}

// Scores weights on the test data of the tasks seen so far.
function scores(weights, view, tasks_seen) {
  const tasks = Math.min(Number(tasks_seen), description.tasks.length);
  return Array.from({ length: tasks }, (_, task) => {
    const { x, y } = examples(task, 'test');
    const [support, predicted, correct] = [0, 1, 2].map(() => new Array(K).fill(0));
    let loss_sum = 0;
    y.forEach((label, n) => {
      const p = predict(weights, x, n), best = p.indexOf(Math.max(...p));
      support[label]++, predicted[best]++;
      if (best === label) correct[label]++;
      loss_sum -= Math.log(p[label]);
    });
    return { view, rule: 'classifier', test_set: `task/${task}`, support, predicted, correct, loss_sum };
  });
}

// --- the run -------------------------------------------------------------------------------------

let session, experiment, beat_every_s, last_beat = 0;

async function join() {
  session = fs.existsSync(session_file) ? JSON.parse(fs.readFileSync(session_file)) : {};
  session.token ??= crypto.randomBytes(16).toString('base64'); // kept before it is sent
  fs.writeFileSync(session_file, JSON.stringify(session));
  const { partition, ...own } = description; // JSON here has one kind of number, and a Table two
  const answer = await unary('Join', { client_id, protocol: PROTOCOL, run_id: session.run_id,
    token: Buffer.from(session.token, 'base64'), description: own });
  session = { run_id: answer.run_id, token: answer.token.toString('base64') };
  fs.writeFileSync(session_file, JSON.stringify(session));
  [experiment, beat_every_s] = [valuesIn(answer.experiment), answer.beat_every_s];
  const { method, net } = experiment;
  if (method.name !== 'fedavg' || net.name !== 'mlp' || net.hidden?.length !== 0) {
    throw new Error(`this client knows fedavg and an mlp without hidden layers, not ${method.name}`);
  }
}

// Yields the orders of one Pull, each with its weights; parts that are held come out of `held`.
async function* orders(held, issue) {
  const token = Buffer.from(session.token, 'base64');
  const request = { waiting: [{ client_id, token, durable: -1, issue }], held: [...held.keys()]
    .map((digest) => Buffer.from(digest, 'hex')) };
  let order, parts = [], frames = [], received = 0;
  for await (const { header, frame } of server.Pull(request)) {
    if (header) ({ order, parts } = header), (frames = []), (received = 0);
    if (frame) {
      if (Number(frame.offset) !== received || zlib.crc32(frame.payload) !== frame.crc32) {
        throw new Error('a frame is damaged');
      }
      frames.push(frame.payload), (received += frame.payload.length);
    }
    const common = parts.find((part) => part.role === 'common'); // FedAvg has no other part
    if (!order || (!common.held && received < Number(common.bundle.payload_bytes))) continue;
    const digest = common.digest.toString('hex');
    const weights = common.held ? held.get(digest) : decode(common.bundle, Buffer.concat(frames));
    held.clear(), held.set(digest, weights);
    yield { order, weights: structuredClone(weights) };
    order = undefined;
  }
}

// Says that this client is at work, as often as the server asked for. A Beat that gets lost does no
// harm: the next one comes. An order that nobody wants any more ends with ABORTED, as its Push would.
const beat = (interaction, epoch, loss) => new Promise((resolve, reject) => {
  if (Date.now() - last_beat < 1000 * beat_every_s) return resolve();
  last_beat = Date.now();
  const token = Buffer.from(session.token, 'base64');
  const request = { client_id, token, epoch, batch: 0, loss, durable: -1, interaction };
  server.Beat(request, { deadline: last_beat + 5000 }, (error, answer) => (answer?.superseded
    ? reject(Object.assign(new Error('superseded'), { code: grpc.status.ABORTED })) : resolve()));
});

async function obey(order, weights) {
  const begun = Date.now(), report = { durable: -1, counts: [] };
  let upload = encode({}, {});
  for (const each of order.views.filter((v) => v !== 'after_local')) {
    report.counts.push(...scores(weights, each, order.tasks_seen));
  }
  if (order.kind === 'ORDER_KIND_TRAIN') {
    const set = examples(Number(order.task), 'train'), num_examples = set.y.length;
    const loss = await train(weights, set, experiment.training,
      (epoch, loss) => beat(order.interaction, epoch, loss));
    Object.assign(report, { loss, num_examples, seconds: (Date.now() - begun) / 1000 });
    upload = encode(weights, { num_examples });
    if (order.views.includes('after_local')) {
      report.counts.push(...scores(weights, 'after_local', order.tasks_seen));
    }
  } else if (order.kind === 'ORDER_KIND_FINISH') { // FedAvg keeps no private state: of no bytes
    report.state_sha256 = crypto.createHash('sha256').digest('hex');
  }
  const { kind, interaction, trip } = order, token = Buffer.from(session.token, 'base64');
  const header = { client_id, token, kind, interaction, trip, report, bundle: upload.bundle };
  await push([{ header }, ...upload.frames]);
}

async function main() {
  const held = new Map();
  for (let issue = 0, wait = 100, over = false; !over; wait = Math.min(2 * wait, 2000)) {
    try {
      if (!experiment) await join();
      for await (const { order, weights } of orders(held, issue)) {
        console.log(`${order.kind} of interaction ${order.interaction}`);
        [issue, wait] = [order.issue, 100];
        await obey(order, weights).catch((error) => {
          // ABORTED: nobody wants the result. UNAUTHENTICATED: the order comes again.
          const goes_on = [grpc.status.ABORTED, grpc.status.UNAUTHENTICATED].includes(error.code);
          if (!goes_on) throw error;
        });
      }
    } catch (error) {
      over = error.code === grpc.status.OUT_OF_RANGE;
      if (error.code === grpc.status.UNAUTHENTICATED) experiment = undefined; // join again
      else if (!over && error.code !== grpc.status.UNAVAILABLE) throw error;
    }
    if (!over) await sleep(wait);
  }
  await unary('Leave', { client_id, token: Buffer.from(session.token, 'base64'), reason: 'finished' });
}

main().then(() => server.close(), (error) => {
  console.error(`error: ${error.details || error.message}`);
  process.exit(1);
});
