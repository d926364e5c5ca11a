"""How far one learning rate serves: plan, measures and picture."""
