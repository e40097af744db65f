"""The update, and what decides it: recipe, schedule, the loop around it and its record."""
