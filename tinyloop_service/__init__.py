"""TinyLoop: named prefixes for looped language models, served over gRPC."""
