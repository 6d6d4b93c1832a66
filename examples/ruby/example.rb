# frozen_string_literal: true

# TinyLoop from Ruby: create a prefix, stream from it, cancel a stream, read errors, delete the prefix.
#
#   ruby -I GENERATED example.rb [HOST:PORT]
#
# TINYLOOP_TOKEN or TINYLOOP_TOKEN_FILE: the token to call with; TINYLOOP_TLS_CA: speak TLS, and trust this PEM file.

require 'json'
require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'grpc'
require 'tinyloop/v1/generation_services_pb'
require 'tinyloop/v1/prefix_services_pb'

V1 = Tinyloop::V1
PROMPT = 'In the beginning God created the heaven and the earth.'
SUFFIX = ' And God said,'
ID = 'example-ruby'

# The server refuses what it has no room for as UNAVAILABLE and says when to come back (RetryInfo, and the same in a
# trailer that gRPC's own retries honour). Creating twice and generating twice is safe; deleting twice is not.
SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [
        { service: 'tinyloop.v1.PrefixService', method: 'CreatePrefix' },
        { service: 'tinyloop.v1.GenerationService' }
      ],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: '0.2s',
        maxBackoff: '3s',
        backoffMultiplier: 2,
        retryableStatusCodes: ['UNAVAILABLE']
      }
    }
  ]
}.freeze

# The calls of this program, on one server.
class Example
  def initialize(target, token: nil, authorities: nil)
    credentials = authorities ? GRPC::Core::ChannelCredentials.new(authorities) : :this_channel_is_insecure
    options = { channel_args: { 'grpc.service_config' => JSON.generate(SERVICE_CONFIG) }, timeout: 60 }
    @prefixes = V1::PrefixService::Stub.new(target, credentials, **options)
    @generation = V1::GenerationService::Stub.new(target, credentials, **options)
    @token = token
  end

  def run
    prefix = create
    begin
      stream
      cancel
      refused('nobody-made-this')
      refused(ID, loops: prefix.loops - 1)
    ensure
      delete(prefix)
    end
  end

  def create
    request = V1::CreatePrefixRequest.new(
      prefix_id: ID, input: V1::Input.new(text: PROMPT), ttl: Google::Protobuf::Duration.new(seconds: 600)
    )
    prefix = @prefixes.create_prefix(request, metadata: headers)
    puts "created #{prefix.name}: #{prefix.token_count} tokens, #{prefix.loops} loops"
    prefix
  end

  def stream
    print PROMPT, SUFFIX
    generate(max_tokens: 24, sampling: V1::Sampling.new(temperature: 0.7), seed: 7).execute.each do |response|
      print response.delta.text if response.delta
      report(response.completed) if response.completed
    end
  end

  def report(completed)
    usage = completed.usage
    puts "\n#{completed.finish_reason}: #{usage.completion_tokens} tokens"
    puts "#{usage.cached_tokens} of #{usage.prompt_tokens} prompt tokens came from the prefix"
  end

  # Stops listening midway: the server stops computing.
  def cancel
    call = generate(max_tokens: 1000, ignore_eos: true)
    num_tokens = 0
    call.execute.each do |response|
      num_tokens += response.delta.token_ids.size if response.delta
      call.cancel if num_tokens.positive?
    end
  rescue GRPC::Cancelled
    puts "cancelled after #{num_tokens} tokens"
  end

  # Prints why a call is refused.
  def refused(id, **options)
    generate(id, **options).execute.each {} # errors come as status, never as a message of the stream
    puts 'not refused'
  rescue GRPC::BadStatus => e
    puts Example.explain(e)
  end

  def delete(prefix)
    @prefixes.delete_prefix(V1::DeletePrefixRequest.new(name: prefix.name), metadata: headers)
    puts "deleted #{prefix.name}"
  end

  # A call that `execute` begins: a stream of GenerateResponse.
  def generate(id = ID, **options)
    request = V1::GenerateRequest.new(prefix: "prefixes/#{id}", input: V1::Input.new(text: SUFFIX), **options)
    @generation.generate(request, metadata: headers(id), return_op: true)
  end

  # Who calls, and the prefix's id, by which a proxy before several replicas finds the one that has it.
  def headers(id = ID)
    known = { 'x-tinyloop-prefix' => id }
    @token ? known.merge('authorization' => "Bearer #{@token}") : known
  end

  # What the server says of an error: code, reason, message, and when to try again if waiting helps.
  def self.explain(error)
    details = error.to_rpc_status&.details.to_a
    unpack = ->(type) { details.find { |detail| detail.is(type) }&.unpack(type) }
    info = unpack[Google::Rpc::ErrorInfo] # its reason is what a program acts on; its domain tells it from a proxy's
    delay = unpack[Google::Rpc::RetryInfo]&.retry_delay
    code = GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == error.code }
    reason = ", #{info.reason}" if info&.domain == 'tinyloop'
    again = " (again in #{delay.to_f} s)" if delay
    "#{code}#{reason}: #{error.details}#{again}"
  end
end

$stdout.sync = true # text is shown as it comes
path = ENV.fetch('TINYLOOP_TOKEN_FILE', nil)
token = path ? File.read(path).strip : ENV.fetch('TINYLOOP_TOKEN', nil)
authorities = File.read(ENV['TINYLOOP_TLS_CA']) if ENV.key?('TINYLOOP_TLS_CA')
begin
  Example.new(ARGV.fetch(0, '127.0.0.1:50051'), token: token, authorities: authorities).run
rescue GRPC::BadStatus => e
  abort Example.explain(e)
end
