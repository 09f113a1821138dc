"""Pushing an exported folder to the Hugging Face hub, with the user's own token, which is neither stored nor shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from tether.errors import ConfigError, StorageError, UsageError
from tether.redact import redact, remember_secret


def check_push(repository: str) -> str:
    """The token for a push to OWNER/NAME; raises before anything is computed where a push cannot work."""
    if repository.count("/") != 1:
        raise UsageError(f"--push {repository}: name the repository as OWNER/NAME")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push {repository}: this is no repository's name ({_first(error)})") from None
    if is_offline_mode():
        raise ConfigError("--push: HF_HUB_OFFLINE is set: unset it to reach the hub")
    token = get_token()
    if not token:
        raise ConfigError("--push needs a token that may write: set HF_TOKEN, or log in with `hf auth login`")
    remember_secret(token)
    return token


def push_folder(
    folder: Path, repository: str, token: str, *, private: bool, message: str, files: tuple[Path, ...] = ()
) -> str:
    """Upload the folder, and `files` beside it; a repository that is there gets a new commit. Returns its address."""
    api = HfApi(token=token)

    def push() -> str:
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
        for file in files:
            api.upload_file(
                path_or_fileobj=file, path_in_repo=file.name, repo_id=repository, commit_message=f"add {file.name}"
            )
        return str(url)

    return _in_a_sentence(push, repository, api.endpoint)


def _in_a_sentence(push: Callable[[], str], repository: str, endpoint: str) -> str:
    try:
        return push()
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status == 401:
            raise ConfigError(
                "--push: the hub does not know the token: make a new one, with write permission"
            ) from None
        if status in (403, 404, 409):
            raise ConfigError(
                f"--push {repository}: the name is taken, or the token may not write there: choose a name of your own, "
                "or a token with write permission"
            ) from None
        reason = redact(_first(error))
        raise StorageError(f"--push {repository}: the hub answered {status or 'nothing'} ({reason})") from None
    except Exception as error:
        if not _is_network(error):
            raise
        reason = redact(_first(error) or type(error).__name__)
        raise StorageError(
            f"--push: {endpoint} cannot be reached ({reason}): check the network, and try again"
        ) from None


def _is_network(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is of the connection."""
    while error is not None:
        if isinstance(error, OSError | TimeoutError) or type(error).__module__.split(".")[0] in (
            "httpx",
            "httpcore",
            "httpx2",
            "httpcore2",
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
