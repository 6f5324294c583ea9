// How tables and weights travel: docs/protocol.md, "Payloads" and "Tables".
'use strict';
const { crc32 } = require('zlib');

const ALIGNMENT = 64, FRAME_BYTES = 1 << 20, WHOLE_BYTES = 2 << 20;

// Returns a Value of the schema as a plain value, and a Table as an object of them.
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
    frames.push({ frame: { offset: at, crc32: crc32(piece), payload: piece } });
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

module.exports = { decode, encode, valuesIn };
