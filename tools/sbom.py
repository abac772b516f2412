#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""sbom.py WHEEL OUTPUT: writes the list of a wheel's files, with their checksums and licences, and of the libraries that
they need, as SPDX 2.3. Fails if a file that the project wrote has no SPDX-License-Identifier."""

import datetime
import hashlib
import json
import pathlib
import re
import sys
import zipfile

LICENSE = "Apache-2.0"
WRITTEN_BY_TOOLS = re.compile(r"\.dist-info/|/gradaccum(Targets|ConfigVersion)\.cmake$")
NEEDED = ("torch", "nlohmann_json")  # of the machine that uses the wheel; gradaccumConfig.cmake checks their versions


def described(number, name, content):
    """Returns the entry of a file."""
    found = re.search(rb"SPDX-License-Identifier: (\S+)", content[:400])
    if not found and not WRITTEN_BY_TOOLS.search(name):
        sys.exit(f"sbom.py: {name} must begin with the line SPDX-License-Identifier: {LICENSE}")
    sums = [{"algorithm": kind.upper(), "checksumValue": hashlib.new(kind, content).hexdigest()} for kind in ("sha1", "sha256")]
    return {"SPDXID": f"SPDXRef-File-{number}", "fileName": f"./{name}", "checksums": sums, "licenseConcluded": LICENSE,
            "licenseInfoInFiles": [found[1].decode() if found else "NONE"], "copyrightText": "NOASSERTION"}


def package(name, **more):
    return {"SPDXID": f"SPDXRef-Package-{name.replace('_', '-')}", "name": name, "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False, "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION",
            "copyrightText": "NOASSERTION", **more}


def document(wheel):
    """Returns the list for a wheel. It depends on nothing else, so it is the same each time."""
    with zipfile.ZipFile(wheel) as archive:
        files = [described(number, name, archive.read(name)) for number, name in enumerate(sorted(archive.namelist()))]
        made = datetime.datetime(*max(entry.date_time for entry in archive.infolist())).isoformat() + "Z"
    name, version, *_ = wheel.stem.split("-")
    sums = sorted(file["checksums"][0]["checksumValue"] for file in files)
    code = hashlib.sha1("".join(sums).encode()).hexdigest()
    own = package(name, versionInfo=version, filesAnalyzed=True, licenseConcluded=LICENSE, licenseDeclared=LICENSE,
                  packageVerificationCode={"packageVerificationCodeValue": code}, licenseInfoFromFiles=[LICENSE],
                  hasFiles=[file["SPDXID"] for file in files])
    needed = [package(one) for one in NEEDED]
    return {"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": wheel.stem,
            "documentNamespace": f"https://spdx.org/spdxdocs/{wheel.stem}-{code}",
            "creationInfo": {"created": made, "creators": ["Tool: gradaccum-sbom.py"]},
            "packages": [own, *needed], "files": files, "documentDescribes": [own["SPDXID"]],
            "relationships": [{"spdxElementId": own["SPDXID"], "relationshipType": "DEPENDS_ON",
                               "relatedSpdxElement": one["SPDXID"]} for one in needed]}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    pathlib.Path(sys.argv[2]).write_text(json.dumps(document(pathlib.Path(sys.argv[1])), indent=1) + "\n")
