// What @grpc/grpc-js does with a router: `node cases.js CASE OPTIONS`, the cases of python_cases.py.
'use strict';

const assert = require('node:assert');
const fs = require('node:fs');
const path = require('node:path');
const { setTimeout: sleep } = require('node:timers/promises');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const VOCABULARY = 6144;
const LARGE_BYTES = 60 * 2 ** 20;
const MAX_MESSAGE_BYTES = 64 * 2 ** 20;
const ENDLESS = 20_000;
const GZIP = 2;

const loaded = grpc.loadPackageDefinition(
  loader.loadSync(['trtmesh/v1/router.proto', 'trtmesh/kserve/grpc_service.proto'], {
    includeDirs: [process.env.PROTOS],
    keepCase: true,
    longs: Number,
    enums: String,
    oneofs: true,
    defaults: true,
  }),
);
const Mesh = loaded.trtmesh.v1.MeshService;
const Triton = loaded.inference.GRPCInferenceService;

class Connection {
  constructor(options) {
    const given = {
      'grpc.max_receive_message_length': MAX_MESSAGE_BYTES,
      'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
    };
    if (options.keepalive_seconds) {
      given['grpc.keepalive_time_ms'] = options.keepalive_seconds * 1000;
      given['grpc.keepalive_timeout_ms'] = 5000;
      given['grpc.keepalive_permit_without_calls'] = 1;
    }
    if (options.gzip) given['grpc.default_compression_algorithm'] = GZIP;
    const credentials = options.ca
      ? grpc.credentials.createSsl(fs.readFileSync(options.ca))
      : grpc.credentials.createInsecure();
    // One channel for all services.
    this.mesh = new Mesh(options.address, credentials, given);
    this.triton = new Triton(options.address, credentials, {
      ...given,
      channelOverride: this.mesh.getChannel(),
    });
  }

  close() {
    this.mesh.close();
  }

  /** A call without messages of its own. */
  raw(method) {
    const same = (bytes) => bytes;
    return new Promise((resolve, reject) => {
      this.mesh.makeUnaryRequest(method, same, same, Buffer.alloc(0), (error, answer) =>
        error ? reject(error) : resolve(answer),
      );
    });
  }

  infer(request) {
    return new Promise((resolve, reject) => {
      this.triton.ModelInfer(request, (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  }
}

function texts(...values) {
  return Buffer.concat(
    values.flatMap((value) => {
      const size = Buffer.alloc(4);
      size.writeUInt32LE(Buffer.byteLength(value));
      return [size, Buffer.from(value)];
    }),
  );
}

const int32 = (...values) => Buffer.from(Int32Array.from(values).buffer);
const fp32 = (...values) => Buffer.from(Float32Array.from(values).buffer);

function inference(model, inputs) {
  return {
    model_name: model,
    inputs: Object.entries(inputs).map(([name, [datatype, shape]]) => ({ name, datatype, shape })),
    raw_input_contents: Object.values(inputs).map(([, , data]) => data),
  };
}

function output(response, name) {
  return response.raw_output_contents[response.outputs.findIndex((each) => each.name === name)];
}

function generation(prompts, maxTokens, logits = false) {
  const items = [];
  for (let number = 0; number < prompts; number++) items.push({ prompt: { text: `one ${number}` } });
  return {
    items,
    config: {
      stopping: { max_tokens: maxTokens, ignore_end_id: true },
      output: { generation_logits: logits },
    },
  };
}

/** The tokens of each item so far, without a gap or a repeat. */
class Seen {
  constructor() {
    this.tokens = {};
    this.logitBytes = 0;
    this.finished = 0;
  }

  see(answer) {
    for (const event of answer.events) {
      assert.notStrictEqual(event.event, 'item_failed', JSON.stringify(event));
      if (event.event === 'item_finished') this.finished += 1;
      if (event.event !== 'tokens') continue;
      const known = this.tokens[event.batch_index] ?? 0;
      assert.strictEqual(event.tokens.token_offset, known);
      this.tokens[event.batch_index] = known + event.tokens.token_ids.length;
      this.logitBytes += event.tokens.details?.generation_logits?.data.length ?? 0;
    }
  }
}

async function refused(code, wait) {
  await assert.rejects(wait, (error) => error.code === grpc.status[code]);
}

async function health(connection) {
  const answer = await connection.raw('/grpc.health.v1.Health/Check');
  assert.deepStrictEqual(answer, Buffer.from([8, 1]));
}

async function generate(connection) {
  const seen = new Seen();
  for await (const answer of connection.mesh.Generate(generation(3, 64))) seen.see(answer);
  assert.deepStrictEqual([seen.tokens, seen.finished], [{ 0: 64, 1: 64, 2: 64 }, 3]);
}

async function model_infer(connection) {
  const response = await connection.infer(
    inference('preprocessing', {
      QUERY: ['BYTES', [2, 1], texts('one two three', 'four')],
      REQUEST_OUTPUT_LEN: ['INT32', [2, 1], int32(3, 4)],
    }),
  );
  assert.deepStrictEqual(output(response, 'REQUEST_OUTPUT_LEN'), int32(3, 4));
  assert(output(response, 'INPUT_ID').length > 0);
}

/** Two requests of a stream, the second sent when the first is answered. */
async function model_stream_infer(connection) {
  const call = connection.triton.ModelStreamInfer();
  const ask = (id) =>
    call.write({
      ...inference('ensemble', {
        text_input: ['BYTES', [1, 1], texts('def f(')],
        max_tokens: ['INT32', [1, 1], int32(20)],
        stream: ['BOOL', [1, 1], Buffer.from([1])],
      }),
      id,
    });
  const waiting = ['first', 'second'];
  ask(waiting[0]);
  for await (const answer of call) {
    assert.strictEqual(answer.error_message, '');
    assert.strictEqual(answer.infer_response.id, waiting[0]);
    if (!answer.infer_response.parameters.triton_final_response.bool_param) continue;
    waiting.shift();
    if (waiting.length) ask(waiting[0]);
    else call.end();
  }
  assert.deepStrictEqual(waiting, []);
}

/** The logits of two prompts, in a single message. */
async function large(connection) {
  const length = LARGE_BYTES / (2 * 4 * VOCABULARY);
  const ids = Array.from({ length: 2 * length }, (_, number) => 100 + number);
  const response = await connection.infer(
    inference('tensorrt_llm', {
      input_ids: ['INT32', [2, length], int32(...ids)],
      input_lengths: ['INT32', [2, 1], int32(length, length)],
      request_output_len: ['INT32', [2, 1], int32(1, 1)],
      return_context_logits: ['BOOL', [2, 1], Buffer.from([1, 1])],
    }),
  );
  assert.strictEqual(output(response, 'context_logits').length, LARGE_BYTES);
}

/** 60 MiB of a stream, of which nothing is read for long after the first message. */
async function pause(connection, { seconds }) {
  const items = 20;
  const tokens = LARGE_BYTES / (items * 4 * VOCABULARY);
  const seen = new Seen();
  let paused = false;
  for await (const answer of connection.mesh.Generate(generation(items, tokens, true))) {
    seen.see(answer);
    if (!paused) await sleep(seconds * 1000);
    paused = true;
  }
  assert.deepStrictEqual(Object.values(seen.tokens), Array(items).fill(tokens));
  assert.deepStrictEqual([seen.logitBytes, seen.finished], [LARGE_BYTES, items]);
}

async function cancel(connection) {
  const seen = new Seen();
  const call = connection.mesh.Generate(generation(2, ENDLESS));
  await refused('CANCELLED', async () => {
    for await (const answer of call) {
      seen.see(answer);
      if ((seen.tokens[0] ?? 0) > 20) call.cancel();
    }
  });
  assert(seen.tokens[0] < ENDLESS);
  // The connection is as good as before.
  await generate(connection);
}

async function deadline(connection) {
  const seen = new Seen();
  const call = connection.mesh.Generate(generation(1, ENDLESS), { deadline: Date.now() + 2000 });
  await refused('DEADLINE_EXCEEDED', async () => {
    for await (const answer of call) seen.see(answer);
  });
  assert(seen.tokens[0] > 0 && seen.tokens[0] < ENDLESS);
  await health(connection);
}

async function wrong_method(connection) {
  await refused('UNIMPLEMENTED', () => connection.raw('/trtmesh.v1.MeshService/Nothing'));
  await refused('UNIMPLEMENTED', () => connection.raw('/no.Service/Generate'));
}

/** PINGs every second, without calls and with one. */
async function keepalive(connection, { seconds }) {
  await health(connection);
  await sleep(seconds * 1000);
  await health(connection);
  await generate(connection);
}

async function tls(connection) {
  await health(connection);
  await generate(connection);
}

/** A request of some KiB, and an answer of 192 KiB of which nearly every element is 0. */
async function compressed(connection) {
  const rows = 8;
  const all = (value) => Array(rows).fill(value);
  const response = await connection.infer(
    inference('preprocessing', {
      QUERY: ['BYTES', [rows, 1], texts(...all('one two three '.repeat(100)))],
      REQUEST_OUTPUT_LEN: ['INT32', [rows, 1], int32(...all(3))],
      EMBEDDING_BIAS_WORDS: ['BYTES', [rows, 1], texts(...all('five'))],
      EMBEDDING_BIAS_WEIGHTS: ['FP32', [rows, 1], fp32(...all(2))],
    }),
  );
  const bias = Buffer.from(output(response, 'EMBEDDING_BIAS'));
  assert.strictEqual(bias.length, 4 * rows * VOCABULARY);
  const values = new Set();
  for (let at = 0; at < bias.length; at += 4) values.add(bias.readFloatLE(at));
  assert.deepStrictEqual(values, new Set([0, 2]));
}

const CASES = {
  health,
  generate,
  model_infer,
  model_stream_infer,
  large,
  pause,
  cancel,
  deadline,
  wrong_method,
  keepalive,
  tls,
  compressed,
};

async function main(name, given) {
  const options = JSON.parse(given);
  const file = path.join(path.dirname(require.resolve('@grpc/grpc-js')), '../../package.json');
  console.log(`grpc-js ${JSON.parse(fs.readFileSync(file)).version} ${name}`);
  const connection = new Connection(options);
  try {
    await CASES[name](connection, options.arguments ?? {});
  } finally {
    connection.close();
  }
}

main(...process.argv.slice(2)).catch((error) => {
  console.log(error);
  process.exitCode = 1;
});
