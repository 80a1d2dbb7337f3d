"""The paper, on torch alone: gates, the Lagrangian, budgets and exports. README.md of this folder is the map."""
