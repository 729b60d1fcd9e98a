"""What the notebooks of Tight Fit share: recipes, data, models, the loop, the planner, measurement, records, pictures."""
