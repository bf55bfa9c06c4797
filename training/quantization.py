"""Reduced precisions of an exported model: 16-bit floats for GPUs, 8-bit integers for CPUs.

The ends of the network stay at 32 bits: the scaling of the pixels, and the last layer with the L2 norm. They take
little time and affect the vectors directly.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

ReducedPrecision = Literal["fp16", "int8"]
REDUCED_PRECISIONS: tuple[ReducedPrecision, ...] = get_args(ReducedPrecision)

_LAYERS = ("Conv", "Gemm", "MatMul")
_JOINED = ("Add", "Clip", "Relu", "MaxPool", "Concat")
"""Operations of a convolutional network between two layers that stay at 8 bits."""


def reduce_model(model: Path, out: Path, precision: ReducedPrecision, calibration: Iterable[NDArray[np.uint8]]) -> None:
    """Writes `model` at a reduced precision; only int8 reads the batches of `calibration`."""
    with _silence():
        if precision == "fp16":
            _to_half(model, out)
        else:
            _to_int8(model, out, iter(calibration))


def _ends(model: onnx.ModelProto, first: int, last: int) -> list[str]:
    """Returns the nodes before the layer number `first` and from the layer `last` from the end on."""
    nodes = list(model.graph.node)
    layers = [place for place, node in enumerate(nodes) if node.op_type in _LAYERS]
    return [node.name for node in nodes[: layers[first]] + nodes[layers[-last] :]]


def _products(model: onnx.ModelProto) -> list[str]:
    """Returns attention's products of two activations, which are too inaccurate at 8 bits."""
    weights = {weight.name for weight in model.graph.initializer}
    return [node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] not in weights]


def _to_half(model: Path, out: Path) -> None:
    """Converts every float between the ends to 16 bits, with one cast per value that crosses over.

    onnxruntime.transformers.float16 cannot keep the ends: it names a cast twice when two nodes at fp32 read one value.
    """
    loaded = onnx.shape_inference.infer_shapes(onnx.load(model), strict_mode=True)
    graph, ends = loaded.graph, set(_ends(loaded, first=0, last=1))
    typed = [*graph.input, *graph.value_info, *graph.output]
    floats = {value.name for value in typed if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    weights = {weight.name: weight for weight in graph.initializer}
    floats |= {name for name, weight in weights.items() if weight.data_type == TensorProto.FLOAT}
    halves = {name for node in graph.node if node.name not in ends for name in node.output if name in floats}
    nodes: list[onnx.NodeProto] = []
    crossed: dict[str, str] = {}
    for node in graph.node:
        inside = node.name not in ends
        for place, name in enumerate(node.input):
            if name not in floats or inside == (name in halves):
                continue
            if name not in crossed:
                crossed[name] = f"{name}_{'half' if inside else 'single'}"
                if name in weights:
                    half = numpy_helper.to_array(weights[name]).astype(np.float16)
                    graph.initializer.append(numpy_helper.from_array(half, crossed[name]))
                else:
                    to = TensorProto.FLOAT16 if inside else TensorProto.FLOAT
                    nodes.append(helper.make_node("Cast", [name], [crossed[name]], f"cast_{crossed[name]}", to=to))
            node.input[place] = crossed[name]
        for attribute in node.attribute if inside else ():
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
            elif attribute.t.data_type == TensorProto.FLOAT:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float16)))
        nodes.append(node)
    used = {name for node in nodes for name in node.input}
    kept = [weight for weight in graph.initializer if weight.name in used]
    new = helper.make_graph(nodes, graph.name, graph.input, graph.output, kept)
    onnx.save(
        helper.make_model(
            new, opset_imports=loaded.opset_import, functions=loaded.functions, ir_version=loaded.ir_version
        ),
        out,
    )


def _to_int8(model: Path, out: Path, calibration: Iterator[NDArray[np.uint8]]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Batches(CalibrationDataReader):  # type: ignore[misc]  # the runtime has no types
        def get_next(self) -> dict[str, Any] | None:
            batch = next(calibration, None)
            return None if batch is None else {"pixels": batch}

    prepared = out.with_name("prepared.onnx")
    try:
        quant_pre_process(model, prepared, skip_symbolic_shape=True)
        ready = onnx.load(prepared)
        # A transformer's sums hold outliers that 8 bits cannot: there only the layers are reduced.
        normed = any(node.op_type == "LayerNormalization" for node in ready.graph.node)
        quantize_static(
            prepared,
            out,
            Batches(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=[*_LAYERS, *(() if normed else _JOINED)],
            # The first layers have few channels of many pixels, and the last ones affect the vectors directly: 8 bits
            # gain little there and lose most.
            nodes_to_exclude=_ends(ready, first=3, last=2) + _products(ready),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Weights of 7 bits: processors without VNNI add two products in 16 bits, which 8 bits would overflow.
            reduce_range=True,
        )
    finally:
        prepared.unlink(missing_ok=True)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppresses the converters' prints, warnings and logs; their errors are exceptions."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
