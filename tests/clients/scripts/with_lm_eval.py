"""What `lm-eval` measures over ``local-completions``: log-likelihoods of the (context, continuation) pairs on stdin."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

if __name__ == "__main__":
    url, folder = sys.argv[1:]
    model = LocalCompletionsAPI(
        model="small",
        base_url=f"{url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=folder,
        max_length=512,
        batch_size=2,
    )
    pairs = json.load(sys.stdin)
    asked = [Instance("loglikelihood", {}, tuple(pair), i, ("made", i, 1)) for i, pair in enumerate(pairs)]
    json.dump(model.loglikelihood(asked), sys.stdout)
