"""Compress a trained model without training: with a few batches of text, and by its weights alone.

python examples/one_shot.py [--steps 300]
"""

import argparse
import copy

from toy import batches, held_out_loss, tiny_llama, train

import rankwise as rw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of training that the model has behind it")
    steps = parser.parse_args().steps

    dense = tiny_llama()
    train(dense, steps)
    budget = rw.Budget(removed=0.5)
    # `compress` works in place
    plain = rw.compress(copy.deepcopy(dense), budget)
    calibrated = rw.compress(copy.deepcopy(dense), budget, calibration=list(batches(8, seed=2)))
    print(f"{'':24} {'parameters':>10} {'nats per byte':>14}")
    for name, model in (("dense", dense), ("SVD of the weights", plain), ("with calibration", calibrated)):
        print(f"{name:24} {rw.count(model):10,} {held_out_loss(model):14.3f}")


if __name__ == "__main__":
    main()
