// TinyLoop from C++: create a prefix, stream from it, cancel a stream, read errors, delete the prefix.
//
//   example [HOST:PORT]
//
// TINYLOOP_TOKEN or TINYLOOP_TOKEN_FILE: the token to call with; TINYLOOP_TLS_CA: speak TLS, and trust this PEM file.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include "google/rpc/code.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "tinyloop/v1/generation.grpc.pb.h"
#include "tinyloop/v1/prefix.grpc.pb.h"

namespace v1 = tinyloop::v1;

namespace {

const std::string kPrompt = "In the beginning God created the heaven and the earth.";
const std::string kSuffix = " And God said,";
const std::string kId = "example-cpp";

// The server refuses what it has no room for as UNAVAILABLE and says when to come back (RetryInfo, and the same in a
// trailer that gRPC's own retries honour). Creating twice and generating twice is safe; deleting twice is not.
constexpr char kServiceConfig[] = R"({
  "methodConfig": [{
    "name": [
      {"service": "tinyloop.v1.PrefixService", "method": "CreatePrefix"},
      {"service": "tinyloop.v1.GenerationService"}
    ],
    "retryPolicy": {
      "maxAttempts": 5,
      "initialBackoff": "0.2s",
      "maxBackoff": "3s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
})";

// What the server says of an error: code, reason, message, and when to try again if waiting helps.
std::string Explain(const grpc::Status& status) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  google::rpc::ErrorInfo info;  // its reason is what a program acts on; its domain tells it from a proxy's
  google::rpc::RetryInfo retry;
  std::ostringstream reason, again;
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&info) && info.domain() == "tinyloop") reason << ", " << info.reason();
    if (detail.UnpackTo(&retry))
      again << " (again in " << retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9 << " s)";
  }
  const auto& code = google::rpc::Code_Name(static_cast<google::rpc::Code>(status.error_code()));
  return code + reason.str() + ": " + status.error_message() + again.str();
}

void Check(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error(Explain(status));
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string ReadToken() {
  const std::string path = Variable("TINYLOOP_TOKEN_FILE");
  const std::string token = path.empty() ? Variable("TINYLOOP_TOKEN") : ReadFile(path);
  return token.substr(0, token.find_last_not_of(" \r\n") + 1);
}

std::shared_ptr<grpc::Channel> Connect(const std::string& target) {
  auto credentials = grpc::InsecureChannelCredentials();
  if (const std::string ca = Variable("TINYLOOP_TLS_CA"); !ca.empty()) {
    grpc::SslCredentialsOptions tls;
    tls.pem_root_certs = ReadFile(ca);
    credentials = grpc::SslCredentials(tls);
  }
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(kServiceConfig);
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

class Example {
 public:
  explicit Example(const std::shared_ptr<grpc::Channel>& channel)
      : prefixes_(v1::PrefixService::NewStub(channel)), generation_(v1::GenerationService::NewStub(channel)) {}

  v1::Prefix Create() {
    v1::CreatePrefixRequest request;
    request.set_prefix_id(kId);
    request.mutable_input()->set_text(kPrompt);
    request.mutable_ttl()->set_seconds(600);
    v1::Prefix prefix;
    Check(prefixes_->CreatePrefix(Context().get(), request, &prefix));
    std::cout << "created " << prefix.name() << ": " << prefix.token_count() << " tokens, " << prefix.loops()
              << " loops" << std::endl;
    return prefix;
  }

  void Stream() {
    v1::GenerateRequest request = Request(kId);
    request.set_max_tokens(24);
    request.mutable_sampling()->set_temperature(0.7);
    request.set_seed(7);
    std::cout << kPrompt << kSuffix << std::flush;
    const auto context = Context();
    const auto reader = generation_->Generate(context.get(), request);
    for (v1::GenerateResponse response; reader->Read(&response);) {
      if (response.has_delta()) std::cout << response.delta().text() << std::flush;
      if (response.has_completed()) Report(response.completed());
    }
    Check(reader->Finish());
  }

  // Stops listening midway: the server stops computing.
  void Cancel() {
    v1::GenerateRequest request = Request(kId);
    request.set_max_tokens(1000);
    request.set_ignore_eos(true);
    const auto context = Context();
    const auto reader = generation_->Generate(context.get(), request);
    int num_tokens = 0;
    for (v1::GenerateResponse response; reader->Read(&response);) {
      num_tokens += response.delta().token_ids_size();
      if (num_tokens > 0) context->TryCancel();
    }
    const grpc::Status status = reader->Finish();
    if (status.error_code() != grpc::StatusCode::CANCELLED) throw std::runtime_error(Explain(status));
    std::cout << "cancelled after " << num_tokens << " tokens" << std::endl;
  }

  // Prints why a call is refused.
  void Refused(const v1::GenerateRequest& request, const std::string& id) {
    const auto context = Context(id);
    const auto reader = generation_->Generate(context.get(), request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) continue;  // errors come as status, never as a message of the stream
    std::cout << Explain(reader->Finish()) << std::endl;
  }

  void Delete(const std::string& name) {
    v1::DeletePrefixRequest request;
    request.set_name(name);
    google::protobuf::Empty nothing;
    const grpc::Status status = prefixes_->DeletePrefix(Context().get(), request, &nothing);
    std::cout << (status.ok() ? "deleted " + name : Explain(status)) << std::endl;
  }

  static v1::GenerateRequest Request(const std::string& id) {
    v1::GenerateRequest request;
    request.set_prefix("prefixes/" + id);
    request.mutable_input()->set_text(kSuffix);
    return request;
  }

 private:
  // A deadline, who calls, and the prefix's id, by which a proxy before several replicas finds the one that has it.
  std::unique_ptr<grpc::ClientContext> Context(const std::string& id = kId) const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    context->AddMetadata("x-tinyloop-prefix", id);
    if (!token_.empty()) context->AddMetadata("authorization", "Bearer " + token_);
    return context;
  }

  static void Report(const v1::Completed& completed) {
    const auto& usage = completed.usage();
    std::cout << "\n" << v1::FinishReason_Name(completed.finish_reason()) << ": " << usage.completion_tokens()
              << " tokens\n" << usage.cached_tokens() << " of " << usage.prompt_tokens()
              << " prompt tokens came from the prefix" << std::endl;
  }

  const std::string token_ = ReadToken();
  const std::unique_ptr<v1::PrefixService::Stub> prefixes_;
  const std::unique_ptr<v1::GenerationService::Stub> generation_;
};

// Deletes the prefix whatever happens meanwhile.
struct Deletion {
  ~Deletion() { example.Delete(name); }
  Example& example;
  const std::string name;
};

void Run(const std::string& target) {
  Example example(Connect(target));
  const v1::Prefix prefix = example.Create();
  const Deletion at_the_end{example, prefix.name()};
  example.Stream();
  example.Cancel();
  example.Refused(Example::Request("nobody-made-this"), "nobody-made-this");
  v1::GenerateRequest other_depth = Example::Request(kId);
  other_depth.set_loops(prefix.loops() - 1);
  example.Refused(other_depth, kId);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Run(argc > 1 ? argv[1] : "127.0.0.1:50051");
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
