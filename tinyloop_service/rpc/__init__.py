"""The gRPC face of the scheduler: protobuf in and out, nothing about how tokens come to be."""
