// gRPC's interop cases by @grpc/grpc-js: `node interop.js CASE ADDRESS`.
'use strict';

const assert = require('node:assert');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTO = path.join(__dirname, '../../conformance/testing.proto');
const INITIAL = 'x-grpc-test-echo-initial';
const TRAILING = 'x-grpc-test-echo-trailing-bin';
const SPECIAL = '\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP \u{1f608}\t\n';
const ASKED = [27182, 8, 1828, 45904];
const ANSWERED = [31415, 9, 2653, 58979];

const loaded = grpc.loadPackageDefinition(loader.loadSync(PROTO, { keepCase: true }));
const service = loaded.grpc.testing.TestService.service;

const payload = (size) => ({ body: Buffer.alloc(size) });
const wanted = (size) => ({ response_parameters: [{ size }] });

/** A unary call: its answer, initial metadata and trailing metadata. */
function unary(client, method, request, metadata = new grpc.Metadata()) {
  return new Promise((resolve, reject) => {
    const said = {};
    const call = client[method](request, metadata, (error, answer) => {
      if (error) reject(error);
      else said.answer = answer;
    });
    call.on('metadata', (initial) => (said.initial = initial));
    call.on('status', (status) => {
      if (status.code === grpc.status.OK) resolve({ ...said, trailing: status.metadata });
    });
  });
}

async function refused(code, details, wait) {
  await assert.rejects(
    wait,
    (error) => error.code === grpc.status[code] && (details === null || error.details === details),
  );
}

async function drained(call) {
  const answers = [];
  for await (const answer of call) answers.push(answer);
  return answers;
}

const CASES = {
  async empty_unary(client) {
    assert.deepStrictEqual((await unary(client, 'EmptyCall', {})).answer, {});
  },

  async large_unary(client) {
    const request = { response_size: 314159, payload: payload(271828) };
    assert.strictEqual((await unary(client, 'UnaryCall', request)).answer.payload.body.length, 314159);
  },

  async client_streaming(client) {
    const answer = await new Promise((resolve, reject) => {
      const call = client.StreamingInputCall((error, found) =>
        error ? reject(error) : resolve(found),
      );
      for (const size of ASKED) call.write({ payload: payload(size) });
      call.end();
    });
    assert.strictEqual(answer.aggregated_payload_size, 74922);
  },

  async server_streaming(client) {
    const parameters = ANSWERED.map((size) => ({ size }));
    const answers = await drained(client.StreamingOutputCall({ response_parameters: parameters }));
    assert.deepStrictEqual(answers.map((each) => each.payload.body.length), ANSWERED);
  },

  async ping_pong(client) {
    const call = client.FullDuplexCall();
    const waiting = [...ANSWERED];
    call.write(wanted(waiting[0]));
    for await (const answer of call) {
      assert.strictEqual(answer.payload.body.length, waiting.shift());
      if (waiting.length) call.write(wanted(waiting[0]));
      else call.end();
    }
    assert.deepStrictEqual(waiting, []);
  },

  async empty_stream(client) {
    const call = client.FullDuplexCall();
    call.end();
    assert.deepStrictEqual(await drained(call), []);
  },

  async timeout_on_sleeping_server(client) {
    const call = client.FullDuplexCall({ deadline: Date.now() + 50 });
    call.write({ payload: payload(27182) });
    await refused('DEADLINE_EXCEEDED', null, () => drained(call));
  },

  async cancel_after_begin(client) {
    await refused('CANCELLED', null, () =>
      new Promise((resolve, reject) => {
        const call = client.StreamingInputCall((error, found) =>
          error ? reject(error) : resolve(found),
        );
        call.cancel();
      }),
    );
  },

  async cancel_after_first_response(client) {
    const call = client.FullDuplexCall();
    call.write(wanted(31415));
    let answers = 0;
    await refused('CANCELLED', null, async () => {
      for await (const answer of call) {
        answers += 1;
        assert.strictEqual(answer.payload.body.length, 31415);
        call.cancel();
      }
    });
    assert.strictEqual(answers, 1);
  },

  async status_code_and_message(client) {
    const request = { response_status: { code: 2, message: 'test status message' } };
    await refused('UNKNOWN', 'test status message', () => unary(client, 'UnaryCall', request));
    const call = client.FullDuplexCall();
    call.write(request);
    call.end();
    await refused('UNKNOWN', 'test status message', () => drained(call));
  },

  async special_status_message(client) {
    const request = { response_status: { code: 2, message: SPECIAL } };
    await refused('UNKNOWN', SPECIAL, () => unary(client, 'UnaryCall', request));
  },

  async custom_metadata(client) {
    const metadata = new grpc.Metadata();
    metadata.set(INITIAL, 'test_initial_metadata_value');
    metadata.set(TRAILING, Buffer.from([0xab, 0xab, 0xab]));
    const { initial, trailing } = await unary(client, 'UnaryCall', {}, metadata);
    assert.deepStrictEqual(initial.get(INITIAL), ['test_initial_metadata_value']);
    assert.deepStrictEqual(trailing.get(TRAILING), [Buffer.from([0xab, 0xab, 0xab])]);
  },

  async unimplemented_method(client) {
    await refused('UNIMPLEMENTED', null, () => raw(client, '/grpc.testing.TestService/None'));
  },

  async unimplemented_service(client) {
    await refused('UNIMPLEMENTED', null, () => raw(client, '/grpc.testing.None/UnimplementedCall'));
  },
};

function raw(client, method) {
  const same = (bytes) => bytes;
  return new Promise((resolve, reject) => {
    client.makeUnaryRequest(method, same, same, Buffer.alloc(0), (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}

async function main(name, address) {
  const Client = grpc.makeGenericClientConstructor(service, 'TestService');
  const client = new Client(address, grpc.credentials.createInsecure());
  try {
    await CASES[name](client);
  } finally {
    client.close();
  }
}

main(...process.argv.slice(2)).catch((error) => {
  console.log(error);
  process.exitCode = 1;
});
