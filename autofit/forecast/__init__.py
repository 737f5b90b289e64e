"""What a workload would take on a card, without one: peaks by phase, the verdict, the largest batch, other cards.

Everything here is predicted and says so; a search measures. The workload is described and traced in child processes that
touch no device, with no weights.
"""

from autofit.forecast.asking import predict
from autofit.forecast.options import PredictOptions
from autofit.forecast.rows import Forecast, Forecasts, structure_words

__all__ = ["Forecast", "Forecasts", "PredictOptions", "predict", "structure_words"]
