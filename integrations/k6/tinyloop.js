// Streams off one shared prefix, at a rate (RATE, open loop) or with so many callers (VUS, closed loop).
// Settings are environment variables, `k6 run -e NAME=VALUE`; README.md beside this file has them all.

import exec from 'k6/execution';
import { Counter, Rate, Trend } from 'k6/metrics';
import { Client, StatusOK, Stream } from 'k6/net/grpc';

const env = (name, fallback) => (__ENV[name] === undefined ? fallback : __ENV[name]);
const TARGET = env('TARGET', '127.0.0.1:50051');
const PREFIX_LEN = Number(env('PREFIX_LEN', 512)); // tokens; 0: no prefix
const SUFFIX_LEN = Number(env('SUFFIX_LEN', 16));
const NEW_TOKENS = Number(env('NEW_TOKENS', 32));
const SHARED = env('SHARED', '1') !== '0' && PREFIX_LEN > 0; // 0: the prefix's tokens are part of each prompt
const PREFIX = `k6-${PREFIX_LEN}`;
const SECURITY = env('CACERT', '') === '' ? { plaintext: true } : { tls: { cacerts: open(env('CACERT', '')) } };

const load = env('RATE', '') === ''
  ? { executor: 'constant-vus', vus: Number(env('VUS', 8)), duration: env('DURATION', '30s') }
  : {
    executor: 'constant-arrival-rate',
    rate: Number(env('RATE', '')),
    timeUnit: '1s',
    duration: env('DURATION', '30s'),
    preAllocatedVUs: Number(env('VUS', 64)),
  };

export const options = {
  scenarios: { streams: { ...load, gracefulStop: '60s' } },
  thresholds: { failed: ['rate==0'] }, // a run with errors ends with status 99
  summaryTrendStats: ['avg', 'med', 'p(90)', 'p(95)', 'p(99)', 'max'],
};

const ttft = new Trend('ttft', true); // sent -> first token
const perToken = new Trend('itl', true); // gap between messages / tokens of the later one, once for each of them
const whole = new Trend('e2e', true); // sent -> end
const tokens = new Counter('tokens');
const prompt = new Counter('prompt_tokens');
const cached = new Counter('cached_tokens'); // of them, read from a prefix
const failed = new Rate('failed');

const client = new Client();
client.load(
  [import.meta.resolve('../../protos')],
  'tinyloop/v1/generation.proto',
  'tinyloop/v1/model.proto',
  'tinyloop/v1/prefix.proto',
);
let connected = false;

function connect() {
  if (!connected) {
    client.connect(TARGET, SECURITY);
    connected = true;
  }
}

function metadata() {
  const given = SHARED ? { 'x-tinyloop-prefix': PREFIX } : {};
  const token = env('TOKEN', '');
  return token === '' ? given : { ...given, authorization: `Bearer ${token}` };
}

// The answer of a unary call; the run ends where it is refused, unless the status is `but`.
function call(method, request, but = StatusOK) {
  const answer = client.invoke(`tinyloop.v1.${method}`, request, { metadata: metadata() });
  if (answer.status !== StatusOK && answer.status !== but) {
    exec.test.abort(`${method}: ${answer.error.message}`);
  }
  return answer.message;
}

// Ids over the vocabulary, others for another seed.
function ids(count, seed, vocabSize) {
  return Array.from({ length: count }, (_, i) => (7919 * (i + 1) + 104729 * seed + 13) % vocabSize);
}

export function setup() {
  connect();
  const { vocabSize } = call('ModelService/GetModel', {}).spec;
  if (SHARED) {
    call('PrefixService/CreatePrefix', { prefix_id: PREFIX, input: { tokens: { ids: ids(PREFIX_LEN, 0, vocabSize) } } });
  }
  return { vocabSize };
}

export function teardown() {
  if (SHARED) {
    connect();
    call('PrefixService/DeletePrefix', { name: `prefixes/${PREFIX}` });
  }
}

export default function ({ vocabSize }) {
  connect();
  const own = ids(SUFFIX_LEN, 1 + exec.scenario.iterationInTest, vocabSize);
  const asked = SHARED ? own : [...ids(PREFIX_LEN, 0, vocabSize), ...own];
  const sent = Date.now();
  let last = 0; // when the message before came
  const stream = new Stream(client, 'tinyloop.v1.GenerationService/Generate', { metadata: metadata() });
  stream.on('data', (message) => {
    const now = Date.now();
    if (message.started) {
      prompt.add(message.started.promptTokens);
      cached.add(message.started.cachedTokens || 0);
    }
    const count = message.delta && message.delta.tokenIds ? message.delta.tokenIds.length : 0;
    if (count > 0) {
      tokens.add(count);
      if (last === 0) {
        ttft.add(now - sent);
      } else {
        for (let i = 0; i < count; i += 1) {
          perToken.add((now - last) / count);
        }
      }
      last = now;
    }
    if (message.completed) {
      whole.add(now - sent);
      failed.add(false);
    }
  });
  stream.on('error', (error) => {
    failed.add(true);
    console.error(`${error.code}: ${error.message}`);
  });
  stream.write({
    prefix: SHARED ? `prefixes/${PREFIX}` : '',
    input: { tokens: { ids: asked } },
    max_tokens: NEW_TOKENS,
    ignore_eos: true,
    omit_text: true,
  });
  stream.end();
}
