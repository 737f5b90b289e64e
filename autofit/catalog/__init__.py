"""Facts that a run needs and no machine here can be asked for: configurations of models by id, memory of GPUs by name.

Facts live in data files, each with its source. Read when first asked for; nothing is fetched, and neither torch nor
transformers is imported. Not here: what this machine's own device reports, which always wins over the catalog.
"""

from autofit.catalog.gpus import Gpu, find_gpu, gpu_names, near_gpus, parse_budget
from autofit.catalog.model_configs import CatalogModel, find_model, model_names

__all__ = ["CatalogModel", "Gpu", "find_gpu", "find_model", "gpu_names", "model_names", "near_gpus", "parse_budget"]
