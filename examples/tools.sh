#!/usr/bin/env bash
# Prints the languages whose example can be built here, one a line: those whose tools and libraries are there.
#
# On Debian and Ubuntu root gets what is missing installed first.  Else a line on standard error says what to install.
set -euo pipefail

languages=(node java cpp ruby)
declare -A packages=(
  [node]="nodejs npm"
  [java]="default-jdk-headless libgrpc-java libnetty-java libnetty-tcnative-java libprotobuf-java libguava-java libperfmark-java \
libgeronimo-annotation-1.3-spec-java libprotobuf-dev protobuf-compiler protobuf-compiler-grpc-java-plugin"
  [cpp]="g++ cmake make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc"
  [ruby]="ruby-grpc ruby-googleapis-common-protos-types libprotobuf-dev protobuf-compiler protobuf-compiler-grpc"
)

can_build() { # LANGUAGE
  case $1 in
    node) type node npm ;;
    java) type javac jar protoc grpc_java_plugin && (cd /usr/share/java && ls grpc-netty.jar netty-codec-http2.jar \
      netty-tcnative.jar protobuf.jar guava.jar perfmark-api.jar geronimo-annotation-1.3-spec.jar) && has_well_known_protos ;;
    cpp) type g++ cmake make pkg-config protoc grpc_cpp_plugin && pkg-config --exists grpc++ protobuf ;;
    ruby) type ruby protoc grpc_ruby_plugin && ruby -rgrpc -rgoogle/rpc/error_details_pb -e exit && has_well_known_protos ;;
  esac >/dev/null 2>&1
}

has_well_known_protos() { protoc -I/usr/include --descriptor_set_out=/dev/null google/protobuf/duration.proto; }

install_what_is_missing() {
  local language wanted=()
  for language in "${languages[@]}"; do
    can_build "$language" || read -ra wanted <<<"${wanted[*]} ${packages[$language]}"
  done
  ((${#wanted[@]})) || return 0
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 0
  echo "Installing what the examples are built with: ${wanted[*]} ..." >&2
  apt-get update -qq >&2 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null || true
}

install_what_is_missing
for language in "${languages[@]}"; do
  if can_build "$language"; then
    echo "$language"
  else
    echo "The example in $language is left out; on Debian and Ubuntu: apt install ${packages[$language]}" >&2
  fi
done
