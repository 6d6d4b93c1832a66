// What sharing costs to use, for a client whose language does not get in the way: a prefix is created, and as soon as it
// is there STREAMS requests off it start at once.  Milliseconds from the first byte sent to the end of the last stream.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "tinyloop/v1/generation.grpc.pb.h"
#include "tinyloop/v1/prefix.grpc.pb.h"

namespace v1 = tinyloop::v1;

namespace {

constexpr char kUsage[] = R"(usage: burst HOST:PORT [STREAMS=50] [TOKENS=32] [ROUNDS=20] [CONNECTIONS=1] [PREFIX=1024]

TOKENS: new ones of each stream.  PREFIX: its tokens, fewer than the model has room for.  CONNECTIONS: that the streams
take turns on.  The first two rounds do not count.
)";
constexpr int kWarmUp = 2;
constexpr int kVocabulary = 1000;  // ids that every model has

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

void Check(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

// Counts streams that have ended, and waits for the last one.
class Countdown {
 public:
  explicit Countdown(int left) : left_(left) {}
  void Down() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--left_ == 0) zero_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    zero_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable zero_;
  int left_;
};

class Stream : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Stream(v1::GenerationService::Stub* stub, const v1::GenerateRequest& request, Countdown* running) : running_(running) {
    stub->async()->Generate(&context_, &request, this);
    StartRead(&message_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    tokens_ += message_.delta().token_ids_size();
    for (const auto& further : message_.further()) tokens_ += further.delta().token_ids_size();
    StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    running_->Down();
  }
  void CheckTokens(int expected) const {
    Check(status_);
    if (tokens_ != expected) throw std::runtime_error("a stream had " + std::to_string(tokens_) + " tokens");
  }

 private:
  grpc::ClientContext context_;
  v1::GenerateResponse message_;
  Countdown* running_;
  grpc::Status status_;
  int tokens_ = 0;
};

struct Options {
  int streams = 50, tokens = 32, rounds = 20, connections = 1, prefix = 1024;
};

class Burst {
 public:
  Burst(const std::string& target, const Options& options) : options_(options) {
    for (int i = 0; i < options.connections; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // else channels to one address share a connection
      auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
      if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10)))
        throw std::runtime_error("nobody answers at " + target);
      generation_.push_back(v1::GenerationService::NewStub(channel));
      if (!prefixes_) prefixes_ = v1::PrefixService::NewStub(channel);
    }
  }

  // The milliseconds that it took.
  double Round() {
    v1::CreatePrefixRequest create;
    for (int i = 0; i < options_.prefix; ++i) create.mutable_input()->mutable_tokens()->add_ids(5 + i * 7919 % kVocabulary);
    v1::GenerateRequest request;
    request.set_max_tokens(options_.tokens);
    request.set_ignore_eos(true);
    request.set_omit_text(true);
    request.set_packed(true);

    const auto began = Clock::now();
    v1::Prefix prefix;
    grpc::ClientContext creating;
    Check(prefixes_->CreatePrefix(&creating, create, &prefix));
    request.set_prefix(prefix.name());
    Countdown running(options_.streams);
    std::vector<std::unique_ptr<Stream>> streams;
    for (int i = 0; i < options_.streams; ++i)
      streams.push_back(std::make_unique<Stream>(generation_[i % options_.connections].get(), request, &running));
    running.Wait();
    const auto ended = Clock::now();

    v1::DeletePrefixRequest remove;
    remove.set_name(prefix.name());
    google::protobuf::Empty nothing;
    grpc::ClientContext deleting;
    Check(prefixes_->DeletePrefix(&deleting, remove, &nothing));
    for (const auto& stream : streams) stream->CheckTokens(options_.tokens);
    return Milliseconds(began, ended);
  }

 private:
  const Options options_;
  std::unique_ptr<v1::PrefixService::Stub> prefixes_;
  std::vector<std::unique_ptr<v1::GenerationService::Stub>> generation_;
};

Options ReadOptions(int count, char** arguments) {
  Options options;
  const std::map<std::string, int*> known = {{"STREAMS", &options.streams},
                                             {"TOKENS", &options.tokens},
                                             {"ROUNDS", &options.rounds},
                                             {"CONNECTIONS", &options.connections},
                                             {"PREFIX", &options.prefix}};
  for (int i = 0; i < count; ++i) {
    const std::string text = arguments[i];
    const auto split = text.find('=');
    const auto found = known.find(text.substr(0, split));
    const int value = split == std::string::npos ? 0 : std::atoi(text.c_str() + split + 1);
    if (found == known.end() || value < 1) throw std::invalid_argument(text);
    *found->second = value;
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw std::invalid_argument("no HOST:PORT");
    const Options options = ReadOptions(argc - 2, argv + 2);
    Burst burst(argv[1], options);
    std::vector<double> times;
    for (int round = 0; round < kWarmUp + options.rounds; ++round) {
      const double time = burst.Round();
      if (round >= kWarmUp) times.push_back(time);
    }
    std::sort(times.begin(), times.end());
    std::printf("%d streams of %d tokens off a prefix of %d, connections: %d: median %.1f ms (%.1f-%.1f) of %d rounds\n",
                options.streams, options.tokens, options.prefix, options.connections, times[times.size() / 2],
                times.front(), times.back(), options.rounds);
    return 0;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "burst: %s is not understood\n\n%s", error.what(), kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "burst: %s\n", error.what());
    return 1;
  }
}
