"""Reduced precisions: input and output types, accuracy and size of the weights."""

import numpy as np
import onnx
from onnx import TensorProto

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import load_pixels
from tests.support.tiny_gallery import COLOURS, tiny_photo
from training.data import DataSet


def test_every_precision_takes_bytes_and_returns_floats(bundles: list[Bundle]) -> None:
    for bundle in bundles:
        graph = onnx.load(bundle.model_path).graph
        assert [value.type.tensor_type.elem_type for value in graph.input] == [TensorProto.UINT8]
        assert [value.type.tensor_type.elem_type for value in graph.output] == [TensorProto.FLOAT]


def test_reduced_vectors_stay_close_and_of_length_one(bundles: list[Bundle], data: DataSet) -> None:
    # Of the colours that int8 was calibrated with: a network with random weights saturates at others.
    colours = sorted({COLOURS.index(photo.label) for photo in data.train})
    pixels = np.stack(
        [load_pixels(tiny_photo(colours[n % len(colours)], n), bundles[0].preprocessing) for n in range(11)]
    )
    exact, half, int8 = (Embedder(bundle, threads=1).embed(pixels) for bundle in bundles)
    for vectors, lowest in ((half, 0.9999), (int8, 0.9)):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert np.sum(exact * vectors, axis=1).min() > lowest


def test_most_weights_are_reduced(bundles: list[Bundle]) -> None:
    for bundle, kind in zip(bundles[1:], (TensorProto.FLOAT16, TensorProto.INT8), strict=True):
        weights = [np.prod(one.dims) for one in onnx.load(bundle.model_path).graph.initializer if one.data_type == kind]
        everything = [np.prod(one.dims) for one in onnx.load(bundle.model_path).graph.initializer]
        assert sum(weights) > 0.5 * sum(everything)
