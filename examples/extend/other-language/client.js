// A client of fedtide in another language, made of the schema and docs/protocol.md alone.
//
// node client.js HOST:PORT CLIENT DATA SESSION
//
// It trains softmax regression ([net] name = "mlp", hidden = []) with FedAvg on DATA/CLIENT, as
// `fedcli partition` writes it, and keeps its session in the file SESSION. This file makes the
// calls; bundle.js says how weights travel; softmax.js reads the data, trains and scores.
'use strict';
const crypto = require('crypto');
const fs = require('fs');
const path = require('path');
const { crc32 } = require('zlib');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const { decode, encode, valuesIn } = require('./bundle');
const softmax = require('./softmax');

const PROTOCOL = 7;
const PROTO = path.join(__dirname, '..', '..', '..', 'proto');
const OPTIONS = { includeDirs: [PROTO], keepCase: true, longs: String, enums: String,
  defaults: true, arrays: true, objects: false, oneofs: true };
const { fedpb } = grpc.loadPackageDefinition(
  loader.loadSync('fedpb/v1/coordinator.proto', OPTIONS));
const [address, client_id, data, session_file] = process.argv.slice(2);
const folder = path.join(data, client_id);
const description = JSON.parse(fs.readFileSync(path.join(folder, 'client.json')));
const server = new fedpb.v1.CoordinatorService(address, grpc.credentials.createInsecure(),
  { 'grpc.max_receive_message_length': 4 << 20,
    'grpc.enable_http_proxy': /^(127\.|localhost:|\[::1\])/.test(address) ? 0 : 1 });
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

// Awaits the answer of a call, begin(done), that may be made again.
const answered = (begin) => patiently(() => new Promise((resolve, reject) =>
  begin((error, answer) => (error ? reject(error) : resolve(answer)))));

const unary = (name, request) => answered((done) => server[name](request, done));

const push = (messages) => answered((done) => {
  const stream = server.Push(done);
  messages.forEach((message) => stream.write(message));
  stream.end();
});

// --- the run -------------------------------------------------------------------------------------

let session, experiment, beat_every_s, last_beat = 0;

// Keeps a session, so that this client joins as the same one after a restart.
function keep(changed) {
  session = changed;
  fs.writeFileSync(session_file, JSON.stringify(session));
}

// Returns what every call says of its caller.
const caller = () => ({ client_id, token: Buffer.from(session.token, 'base64') });

async function join() {
  const before = fs.existsSync(session_file) ? JSON.parse(fs.readFileSync(session_file)) : {};
  keep({ token: crypto.randomBytes(16).toString('base64'), ...before }); // before it is sent
  const { partition, ...own } = description; // JSON here has one kind of number, and a Table two
  const answer = await unary('Join',
    { ...caller(), protocol: PROTOCOL, run_id: session.run_id, description: own });
  keep({ run_id: answer.run_id, token: answer.token.toString('base64') });
  [experiment, beat_every_s] = [valuesIn(answer.experiment), answer.beat_every_s];
  const { method, net } = experiment;
  if (method.name !== 'fedavg' || net.name !== 'mlp' || net.hidden?.length !== 0) {
    throw new Error(`this client knows fedavg and an mlp without hidden layers, not ${method.name}`);
  }
}

// Yields the orders of one Pull, each with its weights; parts that are held come out of `held`.
async function* orders(held, issue) {
  const request = { waiting: [{ ...caller(), durable: -1, issue }],
    held: [...held.keys()].map((digest) => Buffer.from(digest, 'hex')) };
  let order, parts = [], frames = [], received = 0;
  for await (const { header, frame } of server.Pull(request)) {
    if (header) ({ order, parts } = header), (frames = []), (received = 0);
    if (frame) {
      if (Number(frame.offset) !== received || crc32(frame.payload) !== frame.crc32) {
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
const beat = (interaction, epoch) => new Promise((resolve, reject) => {
  if (Date.now() - last_beat < 1000 * beat_every_s) return resolve();
  last_beat = Date.now();
  const request = { ...caller(), epoch, batch: 0, durable: -1, interaction };
  server.Beat(request, { deadline: last_beat + 5000 }, (error, answer) => (answer?.superseded
    ? reject(Object.assign(new Error('superseded'), { code: grpc.status.ABORTED })) : resolve()));
});

// Scores weights on the test data of the tasks that the order counts as seen.
function scores(weights, view, order) {
  const tasks = Math.min(Number(order.tasks_seen), description.tasks.length);
  return Array.from({ length: tasks }, (_, task) => ({ view, rule: 'classifier',
    test_set: `task/${task}`,
    ...softmax.score(weights, softmax.examples(folder, description, task, 'test')) }));
}

// Does what an order asks, and sends the result.
async function obey(order, weights) {
  const { kind, interaction, trip, views } = order, begun = Date.now();
  const received = views.filter((view) => view !== 'after_local');
  const counts = received.flatMap((view) => scores(weights, view, order));
  const report = { durable: -1, counts };
  let upload = encode({}, {});
  if (kind === 'ORDER_KIND_TRAIN') {
    const set = softmax.examples(folder, description, order.task, 'train');
    const num_examples = set.y.length;
    const loss = await softmax.train(weights, set, experiment.training,
      (epoch) => beat(interaction, epoch));
    Object.assign(report, { loss, num_examples, seconds: (Date.now() - begun) / 1000 });
    upload = encode(weights, { num_examples });
    if (views.includes('after_local')) counts.push(...scores(weights, 'after_local', order));
  } else if (kind === 'ORDER_KIND_FINISH') { // FedAvg keeps no private state: of no bytes
    report.state_sha256 = crypto.createHash('sha256').digest('hex');
  }
  const header = { ...caller(), kind, interaction, trip, report, bundle: upload.bundle };
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
  await unary('Leave', { ...caller(), reason: 'finished' });
}

main().then(() => server.close(), (error) => {
  console.error(`error: ${error.details || error.message}`);
  process.exit(1);
});
