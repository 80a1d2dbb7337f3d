"""Healing: a compressed model is trained to answer as the dense one that it was made from. `rankwise heal`."""

from rankwise.lab.experiments.healing.folder import Healed, check_healing, heal_folder, is_unfinished

__all__ = ["Healed", "check_healing", "heal_folder", "is_unfinished"]
