"""The paper, on torch alone: gates, gated matrices, budgets and what moves the gates. Names no model."""
