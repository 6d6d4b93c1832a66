// TinyLoop from Java: create a prefix, stream from it, cancel a stream, read errors, delete the prefix.
//
//   java -jar example.jar [HOST:PORT]
//
// TINYLOOP_TOKEN or TINYLOOP_TOKEN_FILE: the token to call with; TINYLOOP_TLS_CA: speak TLS, and trust this PEM file.

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import tinyloop.v1.Completed;
import tinyloop.v1.CreatePrefixRequest;
import tinyloop.v1.DeletePrefixRequest;
import tinyloop.v1.GenerateRequest;
import tinyloop.v1.GenerateResponse;
import tinyloop.v1.GenerationServiceGrpc;
import tinyloop.v1.Input;
import tinyloop.v1.Prefix;
import tinyloop.v1.PrefixServiceGrpc;
import tinyloop.v1.Sampling;

public final class Example {
  private static final String PROMPT = "In the beginning God created the heaven and the earth.";
  private static final String SUFFIX = " And God said,";
  private static final String ID = "example-java";

  // The server refuses what it has no room for as UNAVAILABLE and says when to come back (RetryInfo, and the same in a
  // trailer that gRPC's own retries honour). Creating twice and generating twice is safe; deleting twice is not.
  private static final Map<String, ?> SERVICE_CONFIG =
      Map.of(
          "methodConfig",
          List.of(
              Map.of(
                  "name",
                  List.of(
                      Map.of("service", "tinyloop.v1.PrefixService", "method", "CreatePrefix"),
                      Map.of("service", "tinyloop.v1.GenerationService")),
                  "retryPolicy",
                  Map.of(
                      "maxAttempts", 5.0,
                      "initialBackoff", "0.2s",
                      "maxBackoff", "3s",
                      "backoffMultiplier", 2.0,
                      "retryableStatusCodes", List.of("UNAVAILABLE")))));

  private final Channel channel;
  private final String token;

  private Example(Channel channel, String token) {
    this.channel = channel;
    this.token = token;
  }

  public static void main(String[] arguments) throws IOException {
    ManagedChannel channel = connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051");
    try {
      new Example(channel, readToken()).run();
    } catch (StatusRuntimeException error) {
      System.err.println(explain(error));
      System.exit(1);
    } finally {
      channel.shutdownNow();
    }
  }

  private static ManagedChannel connect(String target) throws IOException {
    String ca = System.getenv("TINYLOOP_TLS_CA");
    ChannelCredentials credentials =
        ca == null
            ? InsecureChannelCredentials.create()
            : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
    return Grpc.newChannelBuilder(target, credentials)
        .defaultServiceConfig(SERVICE_CONFIG)
        .enableRetry()
        .build();
  }

  private static String readToken() throws IOException {
    String path = System.getenv("TINYLOOP_TOKEN_FILE");
    return path == null ? System.getenv("TINYLOOP_TOKEN") : Files.readString(Path.of(path)).strip();
  }

  private void run() {
    Prefix prefix = create();
    try {
      stream();
      cancel();
      refused("nobody-made-this", GenerateRequest.newBuilder());
      refused(ID, GenerateRequest.newBuilder().setLoops(prefix.getLoops() - 1));
    } finally {
      delete(prefix);
    }
  }

  private Prefix create() {
    CreatePrefixRequest request =
        CreatePrefixRequest.newBuilder()
            .setPrefixId(ID)
            .setInput(text(PROMPT))
            .setTtl(Duration.newBuilder().setSeconds(600))
            .build();
    Prefix prefix = prefixes().createPrefix(request);
    System.out.printf(
        "created %s: %d tokens, %d loops%n", prefix.getName(), prefix.getTokenCount(), prefix.getLoops());
    return prefix;
  }

  private void stream() {
    System.out.print(PROMPT + SUFFIX);
    GenerateRequest.Builder request =
        GenerateRequest.newBuilder()
            .setMaxTokens(24)
            .setSampling(Sampling.newBuilder().setTemperature(0.7))
            .setSeed(7);
    generate(ID, request)
        .forEachRemaining(
            response -> {
              System.out.print(response.getDelta().getText());
              System.out.flush();
              if (response.hasCompleted()) report(response.getCompleted());
            });
  }

  private static void report(Completed completed) {
    var usage = completed.getUsage();
    System.out.printf("%n%s: %d tokens%n", completed.getFinishReason(), usage.getCompletionTokens());
    System.out.printf(
        "%d of %d prompt tokens came from the prefix%n", usage.getCachedTokens(), usage.getPromptTokens());
  }

  /** Stops listening midway: the server stops computing. */
  private void cancel() {
    Context.CancellableContext context = Context.current().withCancellation();
    Context before = context.attach(); // calls that begin from here on end with it
    int numTokens = 0;
    try {
      var responses = generate(ID, GenerateRequest.newBuilder().setMaxTokens(1000).setIgnoreEos(true));
      while (responses.hasNext()) {
        numTokens += responses.next().getDelta().getTokenIdsCount();
        if (numTokens > 0) context.cancel(null);
      }
    } catch (StatusRuntimeException error) {
      if (error.getStatus().getCode() != Status.Code.CANCELLED) throw error;
      System.out.printf("cancelled after %d tokens%n", numTokens);
    } finally {
      context.detach(before);
      context.cancel(null);
    }
  }

  /** Prints why a call is refused. */
  private void refused(String id, GenerateRequest.Builder request) {
    try {
      generate(id, request).forEachRemaining(response -> {}); // errors are never a message of the stream
      System.out.println("not refused");
    } catch (StatusRuntimeException error) {
      System.out.println(explain(error));
    }
  }

  private void delete(Prefix prefix) {
    prefixes().deletePrefix(DeletePrefixRequest.newBuilder().setName(prefix.getName()).build());
    System.out.printf("deleted %s%n", prefix.getName());
  }

  private Iterator<GenerateResponse> generate(String id, GenerateRequest.Builder request) {
    var stub = prepared(GenerationServiceGrpc.newBlockingStub(channel), id);
    return stub.generate(request.setPrefix("prefixes/" + id).setInput(text(SUFFIX)).build());
  }

  private PrefixServiceGrpc.PrefixServiceBlockingStub prefixes() {
    return prepared(PrefixServiceGrpc.newBlockingStub(channel), ID);
  }

  /** A deadline, who calls, and the prefix's id, by which a proxy before replicas finds the one that has it. */
  private <S extends AbstractStub<S>> S prepared(S stub, String id) {
    Metadata headers = new Metadata();
    headers.put(key("x-tinyloop-prefix"), id);
    if (token != null) headers.put(key("authorization"), "Bearer " + token);
    return stub.withDeadlineAfter(60, TimeUnit.SECONDS)
        .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  private static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  private static Input text(String text) {
    return Input.newBuilder().setText(text).build();
  }

  /** What the server says of an error: code, reason, message, and when to try again if waiting helps. */
  private static String explain(StatusRuntimeException error) {
    String reason = "";
    String again = "";
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    try {
      for (Any detail : status.getDetailsList()) {
        if (detail.is(ErrorInfo.class)) { // its reason is what a program acts on; its domain tells it from a proxy's
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          if (info.getDomain().equals("tinyloop")) reason = ", " + info.getReason();
        } else if (detail.is(RetryInfo.class)) {
          Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
          again = String.format(" (again in %s s)", delay.getSeconds() + delay.getNanos() / 1e9);
        }
      }
    } catch (InvalidProtocolBufferException broken) {
      again = " (with details that cannot be read)";
    }
    String message = error.getStatus().getDescription();
    if (error.getCause() != null) message += ": " + error.getCause().getMessage(); // nobody answered
    return error.getStatus().getCode() + reason + ": " + message + again;
  }
}
