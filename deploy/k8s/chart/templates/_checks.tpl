{{/* What no schema can say: values that don't fit together. Each message names the key to change. */}}
{{- define "pdserve.checks" -}}
{{- $values := .Values }}
{{- if and (not $values.insecure) (not (and $values.apiKeys.existingSecret $values.tls.routers)) }}
{{- fail (printf "%s is empty: clients would come in without a proof of who they are. Set apiKeys.existingSecret and tls.routers, or insecure=true in a network that you trust" (empty $values.apiKeys.existingSecret | ternary "apiKeys.existingSecret" "tls.routers")) }}
{{- end }}
{{- if and $values.gateway.replicas (not $values.insecure) (not $values.tls.gateways) }}
{{- fail "tls.gateways is empty: clients would send their API keys to gateways in the clear. Set it, or insecure=true in a network that you trust" }}
{{- end }}
{{- if and $values.gateway.replicas $values.tls.clientAuthorities (not $values.tls.gateways) }}
{{- fail "tls.gateways is empty: with tls.clientAuthorities routers want a certificate of gateways too" }}
{{- end }}
{{- range $key := list "authorities" "workers" "clientAuthorities" "serverName" "workerName" }}
{{- if and (index $values.tls $key) (not $values.tls.routers) }}
{{- fail (printf "tls.%s is set, but tls.routers, the certificate of the routers, isn't" $key) }}
{{- end }}
{{- end }}
{{- if and $values.tls.routers (not $values.tls.authorities) }}
{{- fail "tls.authorities is empty: workers would believe no router with the certificate in tls.routers" }}
{{- end }}
{{- range $pool := list "prefill" "decode" }}
{{- $settings := include "pdserve.settings" (dict "root" $ "component" $pool) | fromJson }}
{{- if and (ne (dig "engine" "kind" "torch" $settings) "fake") (not $values.model.name) }}
{{- fail "model.name is empty: give an alias with model.fetch, or a path under /models with model.volume" }}
{{- end }}
{{- if dig "transport" "link_tls" false $settings }}
{{- range $key := list "workers" "workerName" }}
{{- if not (index $values.tls $key) }}
{{- fail (printf "tls.%s is empty: transport.link_tls needs a certificate of the workers, and the name in it" $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (kindIs "invalid" (index $values $pool).replicas) (not (index $values $pool).maxReplicas) }}
{{- fail (printf "%s.maxReplicas is 0: with %s.replicas=null it must say how many workers there may be" $pool $pool) }}
{{- end }}
{{- if and (index $values $pool).maxReplicas (lt (int (index $values $pool).maxReplicas) (int ((index $values $pool).replicas | default 0))) }}
{{- fail (printf "%s.maxReplicas is %d, less than %s.replicas=%d" $pool (int (index $values $pool).maxReplicas) $pool (int (index $values $pool).replicas)) }}
{{- end }}
{{- end }}
{{- $links := dict }}
{{- range $pool := list "prefill" "decode" }}
{{- $_ := set $links $pool (include "pdserve.settings" (dict "root" $ "component" $pool) | fromJson | dig "transport" "link_tls" false) }}
{{- end }}
{{- if ne $links.prefill $links.decode }}
{{- fail (printf "prefill.config.transport.link_tls is %v and decode.config.transport.link_tls %v: set config.transport.link_tls for both" $links.prefill $links.decode) }}
{{- end }}
{{- if and $values.model.fetch (hasPrefix "/" $values.model.name) }}
{{- fail (printf "model.fetch fetches aliases, and model.name is the path %s" $values.model.name) }}
{{- end }}
{{- if and (hasPrefix "/models/" $values.model.name) (not $values.model.volume) }}
{{- fail (printf "model.volume is empty: nothing would be at model.name=%s" $values.model.name) }}
{{- end }}
{{- $router := include "pdserve.settings" (dict "root" $ "component" "router") | fromJson }}
{{- if and (eq (include "pdserve.most" $values.prefill | int) 0) (not (dig "router" "allow_local_prefill" false $router)) }}
{{- fail "prefill.replicas is 0: no worker would prefill, unless router.config.router.allow_local_prefill=true" }}
{{- end }}
{{- if eq (include "pdserve.most" $values.decode | int) 0 }}
{{- fail "decode.replicas is 0: no worker would decode" }}
{{- end }}
{{- range $component := list "router" "prefill" "decode" "gateway" }}
{{- with (index $values $component).rollingUpdate }}
{{- if and (eq (toString .maxSurge) "0") (eq (toString .maxUnavailable) "0") }}
{{- fail (printf "%s.rollingUpdate.maxUnavailable and maxSurge are both 0: no pod could ever be replaced" $component) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $values.serviceMonitor.enabled $values.networkPolicy.enabled (not $values.networkPolicy.monitoring) }}
{{- fail "networkPolicy.monitoring is empty: serviceMonitor.enabled=true, but nobody may read /metrics" }}
{{- end }}
{{- end }}
