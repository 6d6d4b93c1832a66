"""ONNX Runtime as a calculator: a builder that reads like the formula, and calls bound to memory.

In: operators by name, NumPy arrays.  Out: `Kernel`, a compiled graph, and `Call`, a kernel with its inputs and outputs
bound to NumPy memory that lives on, so that a run copies nothing and costs a few microseconds.  Refuses to know about
models, pages and attention.

All kernels of a process use one thread pool and one memory arena: sessions with pools of their own fight for the cores.
The pool is made once; a later engine that asks for another number of threads gets the first one's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

# Its builds report to their maker over HTTPS unless told otherwise before they load; what runs here is nobody else's.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

ORT_VERSION: str = ort.__version__
Array = NDArray[Any]
Shape = Sequence[int | str]

F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT
U8, I8, I32, I64 = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32, TensorProto.INT64

_OPSET, _IR_VERSION = 21, 10
_CONTRIB = "com.microsoft"


class _Pool:
    """The process's thread pool; `threads` is 0 until it is made."""

    threads = 0


def use_threads(threads: int) -> int:
    """Make the thread pool and the arena if there are none; the number of threads in use."""
    if not _Pool.threads:
        ort.set_global_thread_pool_sizes(threads, 1)
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, None)
        _Pool.threads = threads
    return _Pool.threads


class GraphBuilder:
    """Nodes in the order they are written; every method returns the name of its result."""

    def __init__(self) -> None:
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._renamed: dict[str, str] = {}
        self._count = 0

    def _fresh(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def input(self, name: str, dtype: int, shape: Shape) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, source: str, dtype: int, shape: Shape) -> None:
        """Rename `source`, a node's result that is no output yet."""
        assert source not in self._renamed, f"{source} is an output already"
        self._renamed[source] = name
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def constant(self, value: Array | float) -> str:
        name = self._fresh()
        array = np.float32(value) if isinstance(value, float) else value
        self._constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ops(self, kind: str, *inputs: str, num_outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        outputs = [self._fresh() for _ in range(num_outputs)]
        self._nodes.append(helper.make_node(kind, list(inputs), outputs, domain=domain, **attributes))
        return outputs

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, *inputs, num_outputs=1, **attributes)[0]

    def contrib(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.op(kind, *inputs, domain=_CONTRIB, **attributes)

    def contribs(self, kind: str, *inputs: str, num_outputs: int, **attributes: Any) -> list[str]:
        return self.ops(kind, *inputs, num_outputs=num_outputs, domain=_CONTRIB, **attributes)

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.constant(np.array(shape, np.int64)))

    def transpose(self, x: str, *order: int) -> str:
        return self.op("Transpose", x, perm=order)

    def split(self, x: str, axis: int, *sizes: int) -> list[str]:
        at = self.constant(np.array(sizes, np.int64))
        return self.ops("Split", x, at, num_outputs=len(sizes), axis=axis)

    def cast(self, x: str, dtype: int) -> str:
        return self.op("Cast", x, to=dtype)

    def reduce(self, kind: str, x: str, axis: int, *, keep: bool = True) -> str:
        return self.op(kind, x, self.constant(np.array([axis], np.int64)), keepdims=int(keep))

    def build(self) -> Kernel:
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [self._renamed.get(name, name) for name in names]
        graph = helper.make_graph(self._nodes, "kernel", self._inputs, self._outputs, self._constants)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        model = helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=opsets)
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come back as exceptions
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        providers = ["CPUExecutionProvider"]
        return Kernel(ort.InferenceSession(model.SerializeToString(), options, providers=providers))


class Kernel:
    """A compiled graph."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        """Tie C-contiguous arrays to the graph's names.  The call keeps them alive."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in outputs.items():
            assert array.flags.c_contiguous, f"output {name} is not contiguous"
            address = array.__array_interface__["data"][0]
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, address)
        return Call(self._session, binding, (inputs, outputs))

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        self.bind(inputs, outputs)()


class Call:
    """A kernel and its memory: calling it computes the outputs from what the inputs hold now."""

    __slots__ = ("_arrays", "_binding", "_session")

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, arrays: Any) -> None:
        self._session, self._binding = session, binding
        self._arrays = arrays  # the binding holds bare pointers

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)
