// TinyLoop from Node: create a prefix, stream from it, cancel a stream, read errors, delete the prefix.
//
//   npm ci && node example.js [HOST:PORT]
//
// TINYLOOP_TOKEN or TINYLOOP_TOKEN_FILE: the token to call with; TINYLOOP_TLS_CA: speak TLS, and trust this PEM file.

import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import protobuf from 'protobufjs';

const PROMPT = 'In the beginning God created the heaven and the earth.';
const SUFFIX = ' And God said,';
const ID = 'example-node';
const NAME = `prefixes/${ID}`;

// The server refuses what it has no room for as UNAVAILABLE and says when to come back (RetryInfo, and the same in a
// trailer that gRPC's own retries honour). Creating twice and generating twice is safe; deleting twice is not.
const SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [
        { service: 'tinyloop.v1.PrefixService', method: 'CreatePrefix' },
        { service: 'tinyloop.v1.GenerationService' },
      ],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: '0.2s',
        maxBackoff: '3s',
        backoffMultiplier: 2,
        retryableStatusCodes: ['UNAVAILABLE'],
      },
    },
  ],
};

const definition = protoLoader.loadSync(['tinyloop/v1/prefix.proto', 'tinyloop/v1/generation.proto'], {
  includeDirs: [fileURLToPath(new URL('../../protos', import.meta.url))],
  keepCase: true,
  enums: String,
  longs: String,
  oneofs: true,
  defaults: true,
});
const { v1 } = grpc.loadPackageDefinition(definition).tinyloop;

// Of google/rpc/status.proto and google/rpc/error_details.proto, what is read below.
const { root: rpc } = protobuf.parse(`
  syntax = "proto3";
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Any { string type_url = 1; bytes value = 2; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message RetryInfo { Duration retry_delay = 1; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
`);

const { TINYLOOP_TOKEN_FILE, TINYLOOP_TOKEN, TINYLOOP_TLS_CA } = process.env;
const token = TINYLOOP_TOKEN_FILE ? readFileSync(TINYLOOP_TOKEN_FILE, 'ascii').trim() : TINYLOOP_TOKEN;
const credentials = TINYLOOP_TLS_CA
  ? grpc.credentials.createSsl(readFileSync(TINYLOOP_TLS_CA))
  : grpc.credentials.createInsecure();
const channel = [
  process.argv[2] ?? '127.0.0.1:50051',
  credentials,
  { 'grpc.service_config': JSON.stringify(SERVICE_CONFIG) },
];
const prefixes = new v1.PrefixService(...channel);
const generation = new v1.GenerationService(...channel);
const createPrefix = promisify(prefixes.createPrefix).bind(prefixes);
const deletePrefix = promisify(prefixes.deletePrefix).bind(prefixes);

/** Who calls, and the prefix's id, by which a proxy before several replicas finds the one that has it. */
function headers(prefixId = ID) {
  const metadata = new grpc.Metadata();
  metadata.set('x-tinyloop-prefix', prefixId);
  if (token) metadata.set('authorization', `Bearer ${token}`);
  return metadata;
}

/** Every call has a deadline. */
const soon = () => ({ deadline: Date.now() + 60_000 });

/** The start of a stream of GenerateResponse. */
function generate(request, prefixId = ID) {
  return generation.generate({ prefix: `prefixes/${prefixId}`, ...request }, headers(prefixId), soon());
}

async function create() {
  const request = { prefix_id: ID, input: { text: PROMPT }, ttl: { seconds: 600 } };
  const prefix = await createPrefix(request, headers(), soon());
  console.log(`created ${prefix.name}: ${prefix.token_count} tokens, ${prefix.loops} loops`);
  return prefix;
}

async function stream() {
  process.stdout.write(PROMPT + SUFFIX);
  const request = { input: { text: SUFFIX }, max_tokens: 24, sampling: { temperature: 0.7 }, seed: 7 };
  for await (const { delta, completed } of generate(request)) {
    if (delta) process.stdout.write(delta.text);
    if (completed) {
      const { finish_reason: reason, usage } = completed;
      console.log(`\n${reason}: ${usage.completion_tokens} tokens`);
      console.log(`${usage.cached_tokens} of ${usage.prompt_tokens} prompt tokens came from the prefix`);
    }
  }
}

/** Stops listening midway: the server stops computing. */
async function cancel() {
  const call = generate({ max_tokens: 1000, ignore_eos: true });
  let numTokens = 0;
  try {
    for await (const { delta } of call) {
      numTokens += delta?.token_ids.length ?? 0;
      if (numTokens > 0) call.cancel();
    }
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
    console.log(`cancelled after ${numTokens} tokens`);
  }
}

/** Prints why a call is refused. */
async function refused(request, prefixId) {
  try {
    for await (const _ of generate(request, prefixId)); // errors come as status, never as a message of the stream
    console.log('not refused');
  } catch (error) {
    console.log(explain(error));
  }
}

/** What the server says of an error: code, reason, message, and when to try again if waiting helps. */
function explain(error) {
  if (!(error.metadata instanceof grpc.Metadata)) return String(error.stack); // no error of a call
  const [packed] = error.metadata.get('grpc-status-details-bin');
  const details = packed ? rpc.lookupType('Status').decode(packed).details : [];
  const find = (type) => {
    const found = details.find(({ typeUrl }) => typeUrl === `type.googleapis.com/google.rpc.${type}`);
    return found && rpc.lookupType(type).decode(found.value);
  };
  const code = grpc.status[error.code];
  const info = find('ErrorInfo'); // its reason is what a program acts on; its domain tells it from a proxy's
  const words = info?.domain === 'tinyloop' ? `${code}, ${info.reason}: ${error.details}` : `${code}: ${error.details}`;
  const delay = find('RetryInfo')?.retryDelay;
  return delay ? `${words} (again in ${Number(delay.seconds) + delay.nanos / 1e9} s)` : words;
}

try {
  const prefix = await create();
  try {
    await stream();
    await cancel();
    await refused({ input: { text: SUFFIX } }, 'nobody-made-this');
    await refused({ input: { text: SUFFIX }, loops: prefix.loops - 1 });
  } finally {
    await deletePrefix({ name: NAME }, headers(), soon());
    console.log(`deleted ${NAME}`);
  }
} catch (error) {
  console.error(explain(error));
  process.exitCode = 1;
} finally {
  prefixes.close();
  generation.close();
}
