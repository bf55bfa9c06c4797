"""A bundle whose model averages colours over a grid: real ONNX, exact results, no training."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from index.embedding.bundle import MODEL_FILE, write_card
from index.embedding.images import Preprocessing

SIDE = 32


def make_tiny_bundle(directory: Path, *, grid: int = 4, resize: int = SIDE, loss: str = "none") -> Path:
    """Writes a bundle of dimension 3 * grid ** 2; another `grid` or `resize` makes another bundle id."""
    directory.mkdir(parents=True, exist_ok=True)
    pool = SIDE // grid
    nodes = [
        helper.make_node("Cast", ["pixels"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["float", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "half"], ["centred"]),
        helper.make_node("Transpose", ["centred"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("AveragePool", ["planes"], ["cells"], kernel_shape=[pool, pool], strides=[pool, pool]),
        helper.make_node("Flatten", ["cells"], ["features"]),
        helper.make_node("LpNormalization", ["features"], ["vectors"], axis=1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "colour_grid",
        [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["n", SIDE, SIDE, 3])],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["n", 3 * grid * grid])],
        [
            numpy_helper.from_array(np.array(255.0, np.float32), "scale"),
            numpy_helper.from_array(np.array(0.5, np.float32), "half"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, str(directory / MODEL_FILE))
    write_card(
        directory,
        preprocessing=Preprocessing(resize=resize, input_size=SIDE),
        dimension=3 * grid * grid,
        backbone="colour_grid",
        loss=loss,
        metrics={"recall@1": 0.9},
        untrained_metrics={"recall@1": 0.5},
    )
    return directory
