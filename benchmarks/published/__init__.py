"""Published runs, set up as their sources describe them: what `predict_published.py` has the package predict.

Each module without underscore is a program that a child runs. What they re-make of other people's models and of older
releases is written from public descriptions and holds what matters for memory alone; weights are never loaded.
"""
